"""The objects at one location: delete them, check their existence, list them."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import lru_cache

import obstore
import structlog
from obstore.store import LocalStore

from forgekeeper.platform.database.sessions import require_engine
from forgekeeper.platform.settings.addresses import FALSE_VALUES
from forgekeeper.targets.bulk_deletion import delete_in_bulk
from forgekeeper.targets.deletion import FindLostPaths, ObjectDeletion, finish_until
from forgekeeper.targets.outcomes import OUTSIDE_PREFIXES_REASON, ObjectOutcome, StoreUnavailable
from forgekeeper.targets.s3_requests import is_refusal, requests_to
from forgekeeper.targets.sentinel import PROBE_NAME, SENTINEL_NAME, read_store_owner, why_not_ours
from forgekeeper.targets.store_urls import (
    STORE_ERRORS,
    StoreAnswer,
    check_process,
    describe_error,
    open_store,
    send_request,
    split_url,
)
from forgekeeper.targets.unfinished_uploads import UnfinishedUploads

MAX_CONCURRENT_LOOKUPS = 50
"""Maximum concurrent lookups of single objects."""
SUSPENSION_SECONDS = 3_600.0
"""How long requests of a kind are left out after the store has refused one; a new process asks again."""
SHORT_SUSPENSION_SECONDS = 60.0
"""How long requests of a kind are left out after one had no answer, while others had."""
ABORT_LIMIT_SECONDS = 20.0
"""Time limit for aborting the unfinished uploads of a chunk: the deletion of its objects comes next."""
MAX_REQUEST_RETRIES = 2
REQUEST_RETRY_TIMEOUT = timedelta(seconds=10)
"""Time after which a request is not repeated."""
MAX_KEY_BYTES = 1_024
"""Maximum bytes of a key, S3's limit."""

# Control characters, halves of characters, two that XML does not have, and the ending
# that a local store keeps for files it has not finished writing.
_INVALID_IN_PATH = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]|#[0-9]+\Z")
_FORBIDDEN_PARTS = frozenset({"", ".", "..", SENTINEL_NAME, PROBE_NAME})

log = structlog.get_logger(__name__)


@lru_cache(maxsize=4_096)
def is_normal(path: str) -> bool:
    """Return whether every store accepts *path* unchanged, and whether it may name an object.

    A store would refuse another path or take it for another object.  No object has the sentinel's name.
    """
    # Most paths need no search by the expression, which takes longer than the other checks together.  A run asks three
    # times about each path.
    is_plain = path.isascii() and path.isprintable() and "#" not in path
    return (
        (is_plain or not _INVALID_IN_PATH.search(path))
        and len(path.encode()) <= MAX_KEY_BYTES
        and _FORBIDDEN_PARTS.isdisjoint(path.split("/"))
    )


def is_below(prefixes: Sequence[str], path: str) -> bool:
    """Return whether a normal *path* is in one of the folders; always True without folders."""
    return not prefixes or any(path.startswith(f"{prefix}/") for prefix in prefixes)


class ObjectStore:
    """The objects at one location, which has to belong to *installation*.

    Belongs to the process that made it; threads may share it.  Raises `StoreUnavailable` for a wrong URL or a missing
    folder.  A request without an answer within *request_timeout* has failed.  *prefixes* are folders: if there are any,
    only objects in them are deleted.
    """

    def __init__(
        self,
        location: str,
        url: str,
        *,
        installation: str,
        prefixes: Sequence[str] = (),
        request_timeout: timedelta = timedelta(seconds=30),
    ) -> None:
        self.location = location
        self.installation = installation
        self.prefixes = tuple(prefixes)
        with self._raising_unavailable():
            self.store = open_store(
                url, request_timeout=request_timeout, retries=MAX_REQUEST_RETRIES, retry_timeout=REQUEST_RETRY_TIMEOUT
            )
            self._requests = requests_to(self.store, url, timeout=request_timeout)
        self._timeout = request_timeout.total_seconds() if isinstance(self.store, LocalStore) else None
        self._uploads = None if self._requests is None else UnfinishedUploads(self._requests)
        self._no_aborts_until = 0.0
        self._no_bulk_until = (
            0.0 if split_url(url)[1].get("disable_bulk_delete", "").lower() in FALSE_VALUES else math.inf
        )

    def delete(
        self,
        paths: Sequence[str],
        *,
        until: float | None = None,
        find_lost: FindLostPaths = lambda _paths: (),
        unless_changed_since: Mapping[str, datetime] | None = None,
        uploads_begun_before: Mapping[str, datetime] | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> dict[str, ObjectOutcome]:
        """Delete the objects at *paths*; return the outcome of each.

        Before each request that deletes, *find_lost* is called with its paths.  The paths that it returns stay, because
        another worker has claimed them; so does a file of a local store that is written again after that call.  Paths
        in *unless_changed_since* are checked just before they are deleted.  Unfinished uploads to the paths in
        *uploads_begun_before* are aborted if they began before the instant of their path and the store can abort; if it
        cannot, that is logged and nothing else changes.  *meanwhile* is called when a bulk deletion has been sent, and
        delays only the reading of its answer.

        Stops at *until*, an instant of the monotonic clock, even if the store hangs; answers that arrived by then are
        confirmed for two seconds more.  If a path is missing in the result, its object may be deleted or not.  S3
        reports missing objects as deleted.  Raises `StoreUnavailable` if the sentinel cannot be read or is not this
        installation's, or if no deletion is allowed, and RuntimeError in a forked child.
        """
        require_engine(f"in the store {self.location}")
        check_process()
        deletion = ObjectDeletion(
            self,
            until,
            find_lost,
            meanwhile,
            unless_changed_since=unless_changed_since or {},
            uploads_begun_before=uploads_begun_before or {},
        )
        for path in paths:
            if not is_normal(path):
                deletion.confirmed[path] = ObjectOutcome("failed", "invalid path")
            elif not self.may_delete(path):
                deletion.confirmed[path] = ObjectOutcome("failed", OUTSIDE_PREFIXES_REASON)
        if allowed := [path for path in dict.fromkeys(paths) if path not in deletion.confirmed]:
            asyncio.run(deletion.run(allowed))
        return deletion.confirmed

    def check_present(self, paths: Sequence[str], *, until: float | None = None) -> dict[str, bool]:
        """Return for normal *paths* whether they have objects; an answer counts as in `delete`.

        Stops at *until*, an instant of the monotonic clock; paths without an answer by then are left out.
        Raises `StoreUnavailable`.
        """
        check_process()
        answers: dict[str, bool] = {}
        asyncio.run(finish_until(until, self._check_present(list(dict.fromkeys(paths)), answers)))
        return answers

    def may_delete(self, path: str) -> bool:
        """Return whether objects at a normal *path* may be deleted."""
        return is_below(self.prefixes, path)

    def list_paths(self, prefix: str, *, before: datetime) -> list[str]:
        """Return the path of every object under *prefix* last changed earlier than *before*.

        Raises `StoreUnavailable`, also for a name that the store cannot spell out.
        """
        with self._raising_unavailable():
            found = (one for page in obstore.list(self.store, prefix or None) for one in page)
            paths = [one["path"] for one in found if one["last_modified"] < before]
            return [path for path in paths if path.rpartition("/")[2] != SENTINEL_NAME]

    def read_last_modified(self, path: str) -> datetime | None:
        """Return when the object of exactly that name was last changed, None if it does not exist."""
        with self._raising_unavailable(), suppress(FileNotFoundError):
            return asyncio.run(self.send_counted("head", obstore.head_async, path))["last_modified"]
        return None

    async def _check_present(self, paths: list[str], answers: dict[str, bool]) -> None:
        async for found in self.last_modified(paths):
            await self.confirm_sentinel({})
            answers |= {path: changed is not None for path, changed in found.items() if not isinstance(changed, str)}

    async def last_modified(self, paths: Sequence[str]) -> AsyncIterator[dict[str, datetime | str | None]]:
        """Yield when objects were written, None for a missing object, or why that is unknown."""
        for start in range(0, len(paths), MAX_CONCURRENT_LOOKUPS):
            some = paths[start : start + MAX_CONCURRENT_LOOKUPS]
            yield dict(zip(some, await asyncio.gather(*map(self._last_modified, some)), strict=True))

    async def _last_modified(self, path: str) -> datetime | str | None:
        try:
            return (await self.send_counted("head", obstore.head_async, path))["last_modified"]
        except FileNotFoundError:
            return None
        except STORE_ERRORS as error:
            return describe_error(error)

    def can_delete_in_bulk(self) -> bool:
        """Return whether bulk deletions are requested at present."""
        return self._requests is not None and time.monotonic() >= self._no_bulk_until

    async def delete_in_bulk(self, paths: Sequence[str], meanwhile: Callable[[], None]) -> set[str]:
        """Delete objects in bulk; return the paths that the answer names as deleted.

        Calls *meanwhile* before it reads the answer.  Raises one of `STORE_ERRORS`.
        """
        requests = self._requests
        assert requests is not None, "the caller has asked `can_delete_in_bulk`"
        return await self.send_counted("delete_many", lambda _store: delete_in_bulk(requests, paths, meanwhile))

    def suspend_bulk_deletion(self, error: Exception) -> None:
        """Suspend bulk deletion: the store has deleted objects singly and not in bulk."""
        seconds = _suspension_after(error)
        self._no_bulk_until = time.monotonic() + seconds
        said = "bulk deletion failed, objects are deleted one by one"
        log.warning(said, location=self.location, reason=describe_error(error), seconds=seconds)

    async def abort_uploads(self, begun_before: Mapping[str, datetime]) -> None:
        """Abort the unfinished uploads to these paths.

        If the store cannot, log that and suspend aborts for a while.
        """
        uploads = self._uploads
        if uploads is None or not begun_before or time.monotonic() < self._no_aborts_until:
            return
        try:
            async with asyncio.timeout(ABORT_LIMIT_SECONDS):
                aborted = await self.send_counted("abort_uploads", lambda _store: uploads.abort(begun_before))
        except STORE_ERRORS as error:
            seconds = _suspension_after(error)
            self._no_aborts_until = time.monotonic() + seconds
            log.warning(
                "unfinished uploads not aborted", location=self.location, reason=describe_error(error), seconds=seconds
            )
        else:
            if aborted:
                log.info("unfinished uploads aborted", location=self.location, uploads=aborted)

    async def confirm_sentinel(self, confirmed: dict[str, ObjectOutcome]) -> None:
        """Read the sentinel; raise `StoreUnavailable` unless the place is this installation's."""
        try:
            found = await self.send_counted("get", read_store_owner)
        except STORE_ERRORS as error:
            raise StoreUnavailable(
                f"{self.location}: cannot read {SENTINEL_NAME}: {describe_error(error)}", confirmed
            ) from None
        if said := why_not_ours(self.location, found, self.installation):
            raise StoreUnavailable(said, confirmed)

    async def send_counted(
        self, operation: str, request: Callable[..., Awaitable[StoreAnswer]], *arguments: object
    ) -> StoreAnswer:
        """Send a request and count it, however it ends; a missing object is not a failure."""
        began, failures = time.monotonic(), 0
        try:
            return await send_request(request, self.store, *arguments, timeout_seconds=self._timeout)
        except STORE_ERRORS as error:
            failures = int(not isinstance(error, FileNotFoundError))
            raise
        finally:
            from metrics.instruments import WORKER_METRICS  # only workers need it, and its import takes time

            with suppress(OSError, ValueError):  # of the files in which we count
                seconds = time.monotonic() - began
                WORKER_METRICS.observe(
                    "forgekeeper_object_storage_request_duration_seconds", operation, seconds=seconds
                )
                WORKER_METRICS.inc("forgekeeper_object_storage_request_failures_total", operation, by=failures)

    @contextmanager
    def _raising_unavailable(self) -> Iterator[None]:
        check_process()
        try:
            yield
        except STORE_ERRORS as error:
            raise StoreUnavailable(f"{self.location}: {describe_error(error)}", {}) from None


def _suspension_after(error: Exception) -> float:
    return SUSPENSION_SECONDS if is_refusal(error) else SHORT_SUSPENSION_SECONDS
