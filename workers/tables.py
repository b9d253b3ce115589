"""Which tables and keys each batch goes by, and whether it would misread them."""

from __future__ import annotations

from coordination import uploads
from models import (
    Base,
    BulkImport,
    BulkImportEntity,
    BulkImportTracker,
    DeletedObject,
    GitRefDeletion,
    JobArtifact,
    JobRun,
    Project,
    ProjectStatistics,
    SettledUpload,
    UserStatus,
)
from models.misreading import misread
from workers.clients import client

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
    count = uploads.unread(client)
    if not count:
        return None
    return (
        f"Redis has a hash {uploads.REFERENCE} with {count} uploads, which nobody here reads: let the forge register "
        f"them as docs/uploads.md says, or give forgekeeper a Redis of its own"
    )
