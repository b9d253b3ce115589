"""What a producer of direct uploads written in Python calls; `docs/uploads.md` has the rules.

The register itself knows no tables; here a path that a live row or the outbox names is
refused too, because its object is, or was, somebody else's.
"""

from __future__ import annotations

import redis

from coordination import uploads
from models import DeletedObject, JobArtifact
from workers.stores import ARTIFACTS

complete = uploads.complete
exists = uploads.exists
count = uploads.count
pending_only = uploads.pending_only


class PathTaken(Exception):
    """An artifact or the outbox names this path; a path is used once."""


def prepare(client: redis.Redis, location: str, path: str) -> None:
    """Register an upload that is about to begin; needs a database connection.

    Raises `PathTaken`, `BeingDeleted` while the path's last object is being deleted, and
    `MalformedUpload`.
    """
    if location == ARTIFACTS and (JobArtifact.named([path]) or DeletedObject.named([path])):
        raise PathTaken(f"{location}:{path}: {PathTaken.__doc__}")
    uploads.prepare(client, location, path)
