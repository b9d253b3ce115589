"""`Producer`: the interface for producers of uploads that are written in Python; `docs/uploads.md` has the rules.

The register knows no tables, and may return to an earlier state with its Redis.  So all methods but `count` ask
PostgreSQL, too: a path that a live row or the outbox names is refused, and its record says how an upload has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import redis

from forgekeeper.api.answers import Mistake
from forgekeeper.api.batches import BatchSpec
from forgekeeper.sources.outbox import DeletedObject
from forgekeeper.sources.register.entries import BeingDeleted, MalformedUpload, build_member
from forgekeeper.sources.register.redis_register import RedisRegister
from forgekeeper.sources.settled import NoTransaction, SettledUpload


class PathTaken(Exception):
    """An artifact, the outbox or an earlier upload has this path; use a new path for each upload."""


class Producer:
    """The register of a batch that answers with `Objects(Register(…))`, for producers of its uploads.

    An owner of objects (*unless* of the answer) names all uploads that have completed at the first of its locations.
    An upload that completes elsewhere is recorded in ``settled_uploads``.

    Raises `Mistake` for a batch without a register.

    >>> @batch(cron="*/6 * * * *", budget=timedelta(minutes=4))
    ... def stale_packages(now: datetime) -> Objects[Register]:
    ...     \"\"\"Delete packages whose upload began three hours ago and never completed.\"\"\"
    ...     return Objects(Register("packages", older_than=timedelta(hours=3)))
    >>> producer = Producer(stale_packages)
    """

    PathTaken: ClassVar = PathTaken
    BeingDeleted: ClassVar = BeingDeleted
    MalformedUpload: ClassVar = MalformedUpload
    NoTransaction: ClassVar = NoTransaction

    def __init__(self, batch: BatchSpec) -> None:
        if batch.registered_objects is None:
            raise Mistake(f"Producer of {batch.name}: the batch has to return Objects(Register(…))")
        self._register = RedisRegister(batch.registered_objects.register)
        self._owner: Any = None if batch.registered_objects.unless is None else batch.registered_objects.unless.owner

    def prepare(self, client: redis.Redis, location: str, path: str) -> None:
        """Register an upload that is about to begin; raise `PathTaken`, `BeingDeleted` or `MalformedUpload`."""
        build_member(location, path)
        tables = [table for table in (self._owner, DeletedObject) if table is not None and location in table.locations]
        if any(table.named([path]) for table in tables) or SettledUpload.find_settled(location, [path]):
            raise PathTaken(f"{location}:{path}: {PathTaken.__doc__}")
        self._register.prepare(client, location, path)

    def complete(self, client: redis.Redis, location: str, path: str) -> bool:
        """Remove the upload from the register; return False if it is too late for that.

        Call it in the transaction that has inserted the row, and commit after True: until the transaction ends no run
        decides about the object, and afterwards each run sees the row.  After False the object is deleted or about to
        be, and the upload has failed.  If the answer is lost, the upload has failed as well: asking again answers
        False.  Raises `NoTransaction`, `MalformedUpload`.
        """
        build_member(location, path)
        SettledUpload.lock(location, path)
        if SettledUpload.find_settled(location, [path]) or not self._register.complete(client, location, path):
            return False
        if self._owner is None or location != self._owner.locations[0]:
            # No table says that it lives, if the register returns to an earlier state.
            SettledUpload.record_completed(location, path)
        return True

    def exists(self, client: redis.Redis, location: str, path: str) -> bool:
        """Return whether the upload is pending."""
        return bool(self.pending_only(client, location, [path]))

    def count(self, client: redis.Redis) -> int:
        """Count the uploads that may still complete."""
        return self._register.count_pending(client)

    def pending_only(self, client: redis.Redis, location: str, paths: Sequence[str]) -> list[str]:
        """Return the *paths* that are pending, in their order."""
        pending = self._register.pending_only(client, location, paths)
        settled = SettledUpload.find_settled(location, pending)
        return [path for path in pending if path not in settled]
