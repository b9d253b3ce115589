"""Delete objects in bulk, and believe only what is certain.

A bulk deletion that fails says nothing about any of its objects, and an object that is missing may be on a disk that
has just gone.  So after a bulk error each object is tried by itself, and an answer counts only once the sentinel has
been read after it.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal

import obstore
from obstore.store import LocalStore

from forgekeeper.database.sessions import insist
from forgekeeper.storage.opening import FAILURES, Answer, answer, check_process, open_store, reason
from forgekeeper.storage.sentinel import NAME, objection, owner

BULK = 1_000
"""As many as one request to S3 may name."""
UNCONFIRMED = 100
"""So many answers about single objects wait for the sentinel at most."""
LOOKS = 50
"""So many objects are looked at at once."""
PROBE = ".forgekeeper-probe"
"""A name that no object has: credentials that may delete anything may delete this."""
RETRIES = 2
RETRY_TIMEOUT = timedelta(seconds=10)
"""After that long no request is repeated."""
LONGEST = 1_024
"""Bytes, S3's limit for a key."""

# Control characters, halves of characters, two that XML does not have, and the ending
# that a local store keeps for files it has not finished writing.
_UNFIT = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]|#[0-9]+\Z")


def is_normal(path: str) -> bool:
    """Return whether every store takes *path* as it stands, and whether it may name an object at all.

    What is not normal would be refused or mean another object; nothing may name the sentinel.
    """
    forbidden = {"", ".", "..", NAME, PROBE}
    return not _UNFIT.search(path) and len(path.encode()) <= LONGEST and forbidden.isdisjoint(path.split("/"))


def is_below(prefixes: Sequence[str], path: str) -> bool:
    """Return whether *path*, a normal one, lies in one of the folders; where there are none, everything does."""
    return not prefixes or any(path.startswith(f"{prefix}/") for prefix in prefixes)


@dataclass(frozen=True)
class Outcome:
    """What became of one object; one that *failed* may still be there."""

    state: Literal["deleted", "missing", "failed", "changed"]
    reason: str = ""


DELETED = Outcome("deleted")
MISSING = Outcome("missing")
OUTSIDE = "outside the folders of FORGEKEEPER_OBJECT_PREFIXES"
"""Why an object stays that lies where nothing may be deleted."""
CHANGED = Outcome("changed")
"""Left alone: it was written since it was last looked at."""


class StoreUnavailable(Exception):
    """Nothing is to be believed about any object of this call that is not in *known*.

    Where it had not *begun*, nothing was asked for that could delete one.
    """

    error_kind = "object_storage"
    began = True

    def __init__(self, message: str, known: dict[str, Outcome]) -> None:
        super().__init__(message)
        self.known = known


class Objects:
    """The objects at one location, which has to be *installation*'s.

    Belongs to the process that made it; threads may share it.  Raises `StoreUnavailable` when the URL is wrong or the
    folder is not there.  A request without an answer within *request_timeout* has failed.  Where there are *prefixes*,
    folders, nothing is deleted that lies in none of them.
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
        with self._answering():
            self.store = open_store(url, request_timeout=request_timeout, retries=RETRIES, retry_timeout=RETRY_TIMEOUT)
        self._timeout = request_timeout.total_seconds() if isinstance(self.store, LocalStore) else None

    def delete(
        self,
        paths: Sequence[str],
        *,
        until: float | None = None,
        unless_changed_since: Mapping[str, datetime] | None = None,
    ) -> dict[str, Outcome]:
        """Delete the objects at *paths*; return what became of each.

        Those named in *unless_changed_since* are looked at first, just before they go.  Stops at *until*, an instant of
        the monotonic clock, whatever the store does; a path that is then not in the answer may have been deleted or
        not.  S3 reports missing objects as deleted.  Raises `StoreUnavailable` once the sentinel cannot be read or is
        not this installation's, or nothing at all may be deleted, and RuntimeError in a forked child.
        """
        insist(f"at the store {self.location}")
        check_process()
        deletion = _Deletion(self, unless_changed_since or {})
        for path in paths:
            if not is_normal(path):
                deletion.known[path] = Outcome("failed", "invalid path")
            elif not self.may_delete(path):
                deletion.known[path] = Outcome("failed", OUTSIDE)
        if allowed := [path for path in dict.fromkeys(paths) if path not in deletion.known]:
            asyncio.run(_until(until, deletion.run(allowed)))
        return deletion.known

    def present(self, paths: Sequence[str], *, until: float | None = None) -> dict[str, bool]:
        """Return of *paths*, normal ones, whether there are objects; an answer counts as in `delete`.

        Stops at *until*, an instant of the monotonic clock: of a path that is then not in the answer nothing is known.
        Raises `StoreUnavailable`.
        """
        check_process()
        known: dict[str, bool] = {}
        asyncio.run(_until(until, self._look(list(dict.fromkeys(paths)), known)))
        return known

    def may_delete(self, path: str) -> bool:
        """Return whether *path*, a normal one, lies where objects may be deleted."""
        return is_below(self.prefixes, path)

    def listed(self, prefix: str, *, before: datetime) -> list[str]:
        """Return the path of every object under *prefix* last changed earlier than *before*.

        Raises `StoreUnavailable`, also for a name that the store cannot spell out.
        """
        with self._answering():
            found = (one for page in obstore.list(self.store, prefix or None) for one in page)
            paths = [one["path"] for one in found if one["last_modified"] < before]
            return [path for path in paths if path.rpartition("/")[2] != NAME]

    def written(self, path: str) -> datetime | None:
        """Return when the object of exactly that name was last changed, None where there is none."""
        with self._answering(), suppress(FileNotFoundError):
            return asyncio.run(self.asked("head", obstore.head_async, path))["last_modified"]
        return None

    async def _look(self, paths: list[str], known: dict[str, bool]) -> None:
        async for found in self.last_modified(paths):
            await self.confirm({})
            known |= {path: changed is not None for path, changed in found.items() if not isinstance(changed, str)}

    async def last_modified(self, paths: Sequence[str]) -> AsyncIterator[dict[str, datetime | str | None]]:
        """Yield when some objects were written, None where there is none, or why that is unknown."""
        for start in range(0, len(paths), LOOKS):
            some = paths[start : start + LOOKS]
            yield dict(zip(some, await asyncio.gather(*map(self._last_modified, some)), strict=True))

    async def _last_modified(self, path: str) -> datetime | str | None:
        try:
            return (await self.asked("head", obstore.head_async, path))["last_modified"]
        except FileNotFoundError:
            return None
        except FAILURES as error:
            return reason(error)

    async def confirm(self, known: dict[str, Outcome]) -> None:
        """Read the sentinel; raise `StoreUnavailable` unless the place is this installation's."""
        try:
            found = await self.asked("get", owner)
        except FAILURES as error:
            raise StoreUnavailable(f"{self.location}: cannot read {NAME}: {reason(error)}", known) from None
        if said := objection(self.location, found, self.installation):
            raise StoreUnavailable(said, known)

    async def asked(self, operation: str, ask: Callable[..., Awaitable[Answer]], *arguments: object) -> Answer:
        """Count the request, however it ends; that there is no such object is an answer like others."""
        began, failures = time.monotonic(), 0
        try:
            return await answer(ask, self.store, *arguments, within=self._timeout)
        except FAILURES as error:
            failures = int(not isinstance(error, FileNotFoundError))
            raise
        finally:
            from metrics.counting import WORKER  # there in a worker; a command that asks no store has no use for it

            with suppress(OSError, ValueError):  # of the files in which we count
                seconds = time.monotonic() - began
                WORKER.observe("forgekeeper_object_storage_request_duration_seconds", operation, seconds=seconds)
                WORKER.inc("forgekeeper_object_storage_request_failures_total", operation, by=failures)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        check_process()
        try:
            yield
        except FAILURES as error:
            raise StoreUnavailable(f"{self.location}: {reason(error)}", {}) from None


class _Deletion:
    """One call: what is known for certain, and the answers that the sentinel has not confirmed yet."""

    def __init__(self, objects: Objects, unless_changed_since: Mapping[str, datetime]) -> None:
        self.known: dict[str, Outcome] = {}
        self._objects = objects
        self._unless_changed_since = unless_changed_since
        self._unconfirmed: dict[str, Outcome] = {}
        self._lets_us_delete = False
        store = objects.store
        self._root = Path(str(store.prefix)).resolve() if isinstance(store, LocalStore) else None

    async def run(self, paths: list[str]) -> None:
        try:
            await self._confirm()
        except StoreUnavailable as error:
            error.began = False
            raise
        for start in range(0, len(paths), BULK):
            chunk = await self._unchanged(paths[start : start + BULK])
            # A folder's bulk deletion is no faster, and stops at the first missing file.
            if self._root is not None or not await self._in_bulk(chunk):
                await self._one_by_one(chunk)
            await self._confirm()

    async def _unchanged(self, chunk: list[str]) -> list[str]:
        """Return those that may go: not those that have changed, nor those of which that is unknown."""
        doubtful = [path for path in chunk if path in self._unless_changed_since]
        spared: dict[str, Outcome] = {}
        async for found in self._objects.last_modified(doubtful):
            for path, changed in found.items():
                if isinstance(changed, str):
                    spared[path] = Outcome("failed", changed)
                elif changed is not None and changed >= self._unless_changed_since[path]:
                    spared[path] = CHANGED
        if spared:
            self._unconfirmed |= spared
            await self._confirm()
        return [path for path in chunk if path not in spared]

    async def _confirm(self) -> None:
        """Read the sentinel, and with it believe the answers so far."""
        await self._objects.confirm(self.known)
        refused = [path for path, outcome in self._unconfirmed.items() if outcome.state == "failed"]
        if refused and not self._lets_us_delete:
            await self._probe(refused[0])
        self.known |= self._unconfirmed
        self._unconfirmed.clear()

    async def _probe(self, refused: str) -> None:
        """Find out once whether *refused* is alone, or the store lets us read but not delete."""
        folder = refused.rpartition("/")[0]
        folders = (next(iter(self._objects.prefixes), ""), folder)
        answers = [await self._one(f"{folder}/{PROBE}" if folder else PROBE) for folder in folders]
        self._lets_us_delete = any(answer.state != "failed" for answer in answers)
        if not self._lets_us_delete:
            message = f"{self._objects.location}: nothing may be deleted: {answers[0].reason}"
            raise StoreUnavailable(message, self.known)

    async def _in_bulk(self, chunk: list[str]) -> bool:
        """Return whether all were deleted; if not, some may have been."""
        try:
            await self._objects.asked("delete_many", obstore.delete_async, chunk)
        except FAILURES:
            await self._confirm()
            return False
        self._unconfirmed |= dict.fromkeys(chunk, DELETED)
        return True

    async def _one_by_one(self, chunk: list[str]) -> None:
        for path in chunk:
            self._unconfirmed[path] = outcome = await self._one(path)
            # After a failure at once: a store that has gone is not asked a thousand times.
            if outcome.state == "failed" or len(self._unconfirmed) >= UNCONFIRMED:
                await self._confirm()

    async def _one(self, path: str) -> Outcome:
        if self._root is not None:
            folder, _, name = path.rpartition("/")
            real = (self._root / folder).resolve()
            if not real.is_relative_to(self._root):
                return Outcome("failed", "a symbolic link leads out of the store")
            if not self._objects.may_delete(str((real / name).relative_to(self._root))):
                return Outcome("failed", f"a symbolic link leads {OUTSIDE}")
        try:
            await self._objects.asked("delete", obstore.delete_async, path)
        except FileNotFoundError:
            return MISSING
        except FAILURES as error:
            return Outcome("failed", reason(error))
        return DELETED


async def _until(until: float | None, work: Awaitable[None]) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout_at(until):
            await work
