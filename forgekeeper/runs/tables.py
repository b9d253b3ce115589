"""Which tables and keys each batch goes by, and whether it would misread them."""

from __future__ import annotations

from workers.stale_direct_uploads import register
from forgekeeper.database import Base
from models import (
    BulkImport,
    BulkImportEntity,
    BulkImportTracker,
    GitRefDeletion,
    JobArtifact,
    Project,
    ProjectStatistics,
    UserStatus,
)
from forgekeeper.storage.outbox import DeletedObject
from forgekeeper.runs.ledger import JobRun
from forgekeeper.storage.settled import SettledUpload
from forgekeeper.database.misreading import misread
from forgekeeper.connections import client

TABLES: dict[str, tuple[type[Base], ...]] = {
    "user_status_cleanup": (UserStatus,),
    "git_ref_cleanup": (GitRefDeletion, Project),
    "expired_job_artifacts": (JobArtifact, ProjectStatistics, DeletedObject),
    # Both ask what live artifacts name.
    "delete_objects": (DeletedObject, JobArtifact),
    "stale_direct_uploads": (JobArtifact, DeletedObject, SettledUpload),
    "stale_imports": (BulkImport, BulkImportEntity, BulkImportTracker),
    "prune": (GitRefDeletion, JobRun),
}


def misreadings(batch: str) -> list[str]:
    """Say what the batch would take for all there is, though it is not; nothing when it may run."""
    said = list(misread(TABLES.get(batch, ())))
    if batch == "stale_direct_uploads" and (hidden := unread_register()):
        said.append(hidden)
    return said


def unread_register() -> str | None:
    """Say that uploads are registered where nobody looks, None when none are."""
    count = register.unread(client)
    if not count:
        return None
    return (
        f"Redis has a hash {register.REFERENCE} with {count} uploads, which nobody here reads: let the forge register "
        f"them as docs/uploads.md says, or give forgekeeper a Redis of its own"
    )
