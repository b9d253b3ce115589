"""What a producer of direct uploads written in Python calls; `docs/uploads.md` has the rules.

The register knows no tables, and may go back with its Redis.  So all but `count` ask PostgreSQL, too: a path that a
live row or the outbox names is refused, and what has become of an upload is what is recorded there.
"""

from __future__ import annotations

from collections.abc import Sequence

import redis

from forgekeeper.sources.outbox import DeletedObject
from forgekeeper.sources.settled import SettledUpload
from models import JobArtifact
from workers.stale_direct_uploads import register
from workers.stale_direct_uploads.entries import member

count = register.count


class PathTaken(Exception):
    """An artifact, the outbox or an upload that was settled before names this path; a path is used once."""


def prepare(client: redis.Redis, location: str, path: str) -> None:
    """Register an upload that is about to begin; raise `PathTaken`, `BeingDeleted` or `MalformedUpload`."""
    member(location, path)
    named = any(table.named([path]) for table in (JobArtifact, DeletedObject) if location in table.locations)
    if named or SettledUpload.named(location, [path]):
        raise PathTaken(f"{location}:{path}: {PathTaken.__doc__}")
    register.prepare(client, location, path)


def complete(client: redis.Redis, location: str, path: str) -> bool:
    """Take the upload off the register; return False when it is too late for that.

    Call it in the transaction that has inserted the row, and commit after True: until that ends no sweep decides about
    the object, and afterwards each sees the row.  After False its object is gone or about to go, and the upload has
    failed; so has one whose answer was lost: asking again answers False.  Raises `NoTransaction`, `MalformedUpload`.
    """
    member(location, path)
    SettledUpload.lock(location, path)
    if SettledUpload.named(location, [path]) or not register.complete(client, location, path):
        return False
    if location != JobArtifact.location:
        # No table says that it lives, should the register go back.
        SettledUpload.complete(location, path)
    return True


def exists(client: redis.Redis, location: str, path: str) -> bool:
    """Return whether the upload is pending."""
    return bool(pending_only(client, location, [path]))


def pending_only(client: redis.Redis, location: str, paths: Sequence[str]) -> list[str]:
    """Return those of *paths* that are pending, in their order."""
    pending = register.pending_only(client, location, paths)
    settled = SettledUpload.named(location, pending)
    return [path for path in pending if path not in settled]
