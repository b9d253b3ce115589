"""How much is due, and since when: counted up to a bound, for those who ask every few seconds."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

import peewee as pw

from forgekeeper.database import database
from forgekeeper.storage.outbox import DeletedObject
from models.bulk_imports import STALE_AFTER, BulkImport, BulkImportEntity
from models.job_artifacts import CLASSES, JobArtifact
from models.projects import GitRefDeletion
from models.user_status import UserStatus

BOUND = 100_001
"""Nobody is told more than that there are a hundred thousand and more."""

# One look into the index for each class of artifacts.
OLDEST_ARTIFACT = """
    select min(first.expire_at) from generate_series(0, %(classes)s - 1) as class, lateral (
        select expire_at from ci_job_artifacts
        where mod(project_id + job_id, 10) = class and locked = 0 and file_type <> 3 and expire_at < %(now)s
        order by expire_at, id
        limit 1
    ) as first
"""


class Backlog(NamedTuple):
    """How many records are due, at most `BOUND`, and when the oldest became due."""

    records: int
    oldest: datetime | None = None


def user_statuses(now: datetime) -> Backlog:
    """Look at the statuses whose time has come."""
    return _backlog(UserStatus.due(now).order_by(UserStatus.clear_status_at), UserStatus.clear_status_at)


def git_ref_deletions() -> Backlog:
    """Look at the pending deletions; one that was tried anew counts from then."""
    return _backlog(GitRefDeletion.pending(), GitRefDeletion.updated_at)


def bulk_imports(now: datetime) -> Backlog:
    """Look at the stale imports."""
    return _stale(_backlog(BulkImport.stale(now).order_by(BulkImport.updated_at), BulkImport.updated_at))


def bulk_import_entities(now: datetime) -> Backlog:
    """Look at the stale entities."""
    stale = BulkImportEntity.stale(now).order_by(BulkImportEntity.updated_at)
    return _stale(_backlog(stale, BulkImportEntity.updated_at))


def job_artifacts(now: datetime) -> Backlog:
    """Look at the artifacts that may be destroyed."""
    (oldest,) = database.execute_sql(OLDEST_ARTIFACT, {"now": now, "classes": CLASSES}).fetchone()
    return Backlog(_count(JobArtifact.expired(now)), oldest)


def deleted_objects(now: datetime) -> Backlog:
    """Look at the objects to delete."""
    return _backlog(DeletedObject.due(now).order_by(DeletedObject.pick_up_at), DeletedObject.pick_up_at)


def dead_objects() -> int:
    """Count the objects that were given up."""
    return _count(DeletedObject.dead())


def rejected_refs() -> int:
    """Count the deletions that were refused."""
    return _count(GitRefDeletion.rejected())


def _stale(found: Backlog) -> Backlog:
    """Let a record be due from when it became stale."""
    return Backlog(found.records, found.oldest and found.oldest + STALE_AFTER)


def _count(query: pw.ModelSelect[Any]) -> int:
    count: int = query.limit(BOUND).count()
    return count


def _backlog(query: pw.ModelSelect[Any], due: pw.Field[Any]) -> Backlog:
    """Count what *query* selects; without an order the oldest is that of those which were counted."""
    found = query.select(due.alias("due")).limit(BOUND)
    row = pw.Select([found], [pw.fn.count(pw.SQL("1")), pw.fn.min(found.c.due)]).bind(database).tuples().execute()
    return Backlog(*row[0])
