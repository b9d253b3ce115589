"""Delete objects, in bulk if the store can, and count only certain deletions.

An object counts as deleted once an answer names it, and only after the sentinel was read after that answer: an object
that is missing may be on a disk that has just been unmounted.  An object that the answer to a bulk deletion does not
name is deleted by a request of its own; so is every object of a store without bulk deletion.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.store import LocalStore

from forgekeeper.targets.bulk_deletion import MAX_KEYS_PER_REQUEST
from forgekeeper.targets.outcomes import (
    CLAIM_LOST,
    OBJECT_CHANGED,
    OBJECT_DELETED,
    OBJECT_MISSING,
    OUTSIDE_PREFIXES_REASON,
    ObjectOutcome,
    StoreUnavailable,
)
from forgekeeper.targets.sentinel import PROBE_NAME
from forgekeeper.targets.store_urls import STORE_ERRORS, describe_error

if TYPE_CHECKING:
    from forgekeeper.targets.objects import ObjectStore

MAX_UNCONFIRMED_ANSWERS = 100
"""Maximum answers about single objects that wait for the sentinel."""
MAX_CONCURRENT_DELETIONS = 50
"""Maximum concurrent deletions of single objects."""
LAST_CONFIRMATION_SECONDS = 2.0
"""Time limit for reading the sentinel once more after the time of a deletion is up."""


FindLostPaths = Callable[[Sequence[str]], Collection[str]]


class ObjectDeletion:
    """One call: the certain outcomes, and the answers that the sentinel has not confirmed yet.

    After *until*, an instant of the monotonic clock, only the sentinel is read, to confirm the answers so far.  Before
    each request that deletes, *find_lost* returns its paths that another worker has taken over.
    """

    def __init__(
        self,
        objects: ObjectStore,
        until: float | None,
        find_lost: FindLostPaths,
        meanwhile: Callable[[], None],
        *,
        unless_changed_since: Mapping[str, datetime],
        uploads_begun_before: Mapping[str, datetime],
    ) -> None:
        self.confirmed: dict[str, ObjectOutcome] = {}
        self._objects = objects
        self._until = until
        self._find_lost = find_lost
        self._unless_changed_since = unless_changed_since
        self._uploads_begun_before = uploads_begun_before
        self._meanwhile = meanwhile
        self._unconfirmed: dict[str, ObjectOutcome] = {}
        self._can_delete_any = False
        store = objects.store
        self._root = Path(str(store.prefix)).resolve() if isinstance(store, LocalStore) else None

    async def run(self, paths: Sequence[str]) -> None:
        """Delete the objects at *paths*; raise `StoreUnavailable`."""
        if await finish_until(self._until, self._delete_all(paths)) or not self._unconfirmed:
            return
        await finish_until(time.monotonic() + LAST_CONFIRMATION_SECONDS, self._confirm_answers())

    async def _delete_all(self, paths: Sequence[str]) -> None:
        try:
            await self._confirm_answers()
        except StoreUnavailable as error:
            error.began = False
            raise
        for start in range(0, len(paths), MAX_KEYS_PER_REQUEST):
            chunk = await self._leave_changed(paths[start : start + MAX_KEYS_PER_REQUEST])
            uploads = {path: self._uploads_begun_before[path] for path in chunk if path in self._uploads_begun_before}
            await self._objects.abort_uploads(uploads)
            refusal = await self._delete_chunk(chunk)
            await self._confirm_answers()
            # If no object could be deleted by itself either, the store refuses more than bulk deletion.
            if refusal and any(self.confirmed.get(path) in (OBJECT_DELETED, OBJECT_MISSING) for path in chunk):
                self._objects.suspend_bulk_deletion(refusal)

    async def _leave_changed(self, chunk: Sequence[str]) -> list[str]:
        """Return the paths that may be deleted; leave objects that have changed, or may have."""
        doubtful = [path for path in chunk if path in self._unless_changed_since]
        kept: dict[str, ObjectOutcome] = {}
        async for found in self._objects.last_modified(doubtful):
            for path, changed in found.items():
                if isinstance(changed, str):
                    kept[path] = ObjectOutcome("failed", changed)
                elif changed is not None and changed >= self._unless_changed_since[path]:
                    kept[path] = OBJECT_CHANGED
        if kept:
            self._unconfirmed |= kept
            await self._confirm_answers()
        return [path for path in chunk if path not in kept]

    async def _delete_chunk(self, chunk: Sequence[str]) -> Exception | None:
        """Delete objects, in bulk first; return why bulk deletion failed, None if it worked."""
        deleted: set[str] = set()
        refusal: Exception | None = None
        chunk = self._leave_lost(chunk)
        if len(chunk) > 1 and self._objects.can_delete_in_bulk():
            try:
                deleted = await self._objects.delete_in_bulk(chunk, self._meanwhile)
                refusal = None if deleted else ValueError("the answer to the bulk deletion names no object")
            except STORE_ERRORS as error:
                refusal = error
                await self._confirm_answers()
        self._unconfirmed |= dict.fromkeys(deleted, OBJECT_DELETED)
        await self._delete_singly([path for path in chunk if path not in deleted])
        return refusal

    async def _delete_singly(self, paths: Sequence[str]) -> None:
        for start in range(0, len(paths), MAX_CONCURRENT_DELETIONS):
            files = {path: self._identify_file(path) for path in paths[start : start + MAX_CONCURRENT_DELETIONS]}
            ours = self._leave_lost(list(files))
            await asyncio.gather(*(self._delete_one(path, files[path]) for path in ours))
            self._check_time()
            # Immediately after a failure: a store that is down must not get a thousand requests.
            has_failed = any(outcome.state == "failed" for outcome in self._unconfirmed.values())
            if has_failed or len(self._unconfirmed) >= MAX_UNCONFIRMED_ANSWERS:
                await self._confirm_answers()

    def _leave_lost(self, paths: Sequence[str]) -> list[str]:
        lost = self._find_lost(paths)
        self.confirmed |= dict.fromkeys(lost, CLAIM_LOST)
        return [path for path in paths if path not in lost]

    async def _delete_one(self, path: str, file: tuple[int, int] | None) -> None:
        # A process that was stopped may resume here before the time limit is noticed.
        if self._has_time():
            is_another = self._identify_file(path) not in (file, None)
            self._unconfirmed[path] = OBJECT_CHANGED if is_another else await self._request_deletion(path)

    def _identify_file(self, path: str) -> tuple[int, int] | None:
        """Return the identity and time of the local store's file at *path*; None without a file."""
        with suppress(OSError, ValueError):
            found = (self._root / path).stat() if self._root else None
            return found and (found.st_ino, found.st_mtime_ns)
        return None

    async def _request_deletion(self, path: str) -> ObjectOutcome:
        if self._root is not None and (said := self._why_path_leads_elsewhere(self._root, path)):
            return ObjectOutcome("failed", said)
        try:
            await self._objects.send_counted("delete", obstore.delete_async, path)
        except FileNotFoundError:
            return OBJECT_MISSING
        except STORE_ERRORS as error:
            return ObjectOutcome("failed", describe_error(error))
        return OBJECT_DELETED

    def _why_path_leads_elsewhere(self, root: Path, path: str) -> str | None:
        folder, _, name = path.rpartition("/")
        real = (root / folder).resolve()
        if not real.is_relative_to(root):
            return "a symbolic link leads out of the store"
        if not self._objects.may_delete(str((real / name).relative_to(root))):
            return f"a symbolic link leads {OUTSIDE_PREFIXES_REASON}"
        return None

    def _has_time(self) -> bool:
        return self._until is None or time.monotonic() < self._until

    def _check_time(self) -> None:
        if not self._has_time():
            raise TimeoutError

    async def _confirm_answers(self) -> None:
        """Read the sentinel, which confirms the answers so far."""
        await self._objects.confirm_sentinel(self.confirmed)
        refused = [path for path, outcome in self._unconfirmed.items() if outcome.state == "failed"]
        if refused and not self._can_delete_any:
            await self._probe_deletion(refused[0])
        self.confirmed |= self._unconfirmed
        self._unconfirmed.clear()

    async def _probe_deletion(self, refused: str) -> None:
        """Find out once whether only *refused* fails, or the store allows no deletions at all."""
        folder = refused.rpartition("/")[0]
        folders = (next(iter(self._objects.prefixes), ""), folder)
        answers = [
            await self._request_deletion(f"{folder}/{PROBE_NAME}" if folder else PROBE_NAME) for folder in folders
        ]
        self._can_delete_any = any(answer.state != "failed" for answer in answers)
        if not self._can_delete_any:
            message = f"{self._objects.location}: the store refuses all deletions: {answers[0].reason}"
            raise StoreUnavailable(message, self.confirmed)


async def finish_until(until: float | None, work: Awaitable[None]) -> bool:
    """Do the work until an instant of the monotonic clock; return whether it was finished."""
    with suppress(TimeoutError):
        async with asyncio.timeout_at(until):
            await work
        return True
    return False
