"""How much is due, and since when: counted up to a bound, for those who ask every few seconds."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, NamedTuple

import peewee as pw

from forgekeeper.database import database
from forgekeeper.storage.outbox import DeletedObject
from models.job_artifacts import JobArtifact
from models.projects import GitRefDeletion

BOUND = 100_001
"""Nobody is told more than that there are a hundred thousand and more."""
NO_TIME = timedelta(0)

# One look into the index for each class of artifacts.
OLDEST_ARTIFACT = """
    select min(first.expire_at) from generate_series(0, 9) as class, lateral (
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

    @classmethod
    def of(cls, query: pw.ModelSelect[Any], *, oldest: pw.Field[Any], after: timedelta = NO_TIME) -> Backlog:
        """Count what *query* selects; each became due at the instant in that field, or so much *after* it.

        Without an order the oldest is that of those which were counted.
        """
        found = query.select(oldest.alias("due")).limit(BOUND)
        row = pw.Select([found], [pw.fn.count(pw.SQL("1")), pw.fn.min(found.c.due)]).bind(database).tuples().execute()
        records, instant = row[0]
        return cls(records, instant and instant + after)


def count(query: pw.ModelSelect[Any]) -> int:
    """Count what *query* selects, up to the bound."""
    counted: int = query.limit(BOUND).count()
    return counted


def git_ref_deletions() -> Backlog:
    """Look at the pending deletions; one that was tried anew counts from then."""
    return Backlog.of(GitRefDeletion.pending(), oldest=GitRefDeletion.updated_at)


def job_artifacts(now: datetime) -> Backlog:
    """Look at the artifacts that may be destroyed."""
    (oldest,) = database.execute_sql(OLDEST_ARTIFACT, {"now": now}).fetchone()
    return Backlog(count(JobArtifact.expired(now)), oldest)


def deleted_objects(now: datetime) -> Backlog:
    """Look at the objects to delete."""
    return Backlog.of(DeletedObject.due(now).order_by(DeletedObject.pick_up_at), oldest=DeletedObject.pick_up_at)


def dead_objects() -> int:
    """Count the objects that were given up."""
    return count(DeletedObject.dead())


def rejected_refs() -> int:
    """Count the deletions that were refused."""
    return count(GitRefDeletion.rejected())
