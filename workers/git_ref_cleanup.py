"""Delete the git refs that projects want deleted (batch 58).

Every minute the parent reads the projects with pending rows, a hundred at a time and at most ten thousand per run, and
starts a child for each.  The next run continues after the last project.  A child deletes its project's refs, if
possible in one git transaction, and then closes their rows: a crash between the two repeats a harmless deletion.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from forgekeeper import ChildPerRepository, Refs, StatusQueue, Threshold, batch, child
from models import DeletionStatus, GitRefDeletion, Project, ProjectGroup

LOCK_TIMEOUT = timedelta(minutes=10)
TIME_LIMIT = timedelta(minutes=12)
BATCH_SIZE, MAX_PROJECTS, MAX_DELETES = 100, 10_000, 10_000
KEEP_PROCESSED = timedelta(days=1)


@batch(
    document=58,
    cron="* * * * *",
    budget=LOCK_TIMEOUT,
    time_limit=TIME_LIMIT,
    # Exclusions of groups read it.
    tables=[ProjectGroup],
    thresholds=[Threshold("dead_letter")],
    logged_as="stats",
)
def git_ref_cleanup(now: datetime) -> ChildPerRepository:
    """Delete the git refs that projects want deleted, a child for each project."""
    return ChildPerRepository(page=BATCH_SIZE, most=MAX_PROJECTS)


@child(
    git_ref_cleanup,
    queue="git",
    budget=LOCK_TIMEOUT,
    time_limit=TIME_LIMIT,
    thresholds=[Threshold("dead_letter")],
    collector="git_refs",
)
def clean_project_refs(now: datetime, project_id: int, missing: bool = False) -> Refs[GitRefDeletion]:  # noqa: FBT001, FBT002, a message
    """Delete one project's refs, and start a successor if more are left."""
    return Refs(
        StatusQueue(
            GitRefDeletion,
            status=GitRefDeletion.status,
            pending=DeletionStatus.PENDING,
            processed=DeletionStatus.PROCESSED,
            rejected=DeletionStatus.REJECTED,
            reason=GitRefDeletion.reason,
            created_at=GitRefDeletion.created_at,
            updated_at=GitRefDeletion.updated_at,
            processed_at=GitRefDeletion.processed_at,
            keep_processed=KEEP_PROCESSED,
        ),
        of=project_id,
        missing=missing,
        project=GitRefDeletion.project_id,
        ref=GitRefDeletion.ref,
        expected=GitRefDeletion.expected_oid,
        repository=Project.disk_path,
        most=MAX_DELETES,
        objective=timedelta(hours=2),
        called="ref",
    )
