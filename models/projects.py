"""Projects, and the git refs that wait to be deleted from their repositories (batch 58)."""

from __future__ import annotations

from datetime import datetime
from enum import IntEnum

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from models.database import Base, BigIdentityField, database, default

DELETE_PROCESSED = """
    delete from batched_git_ref_updates_deletions
    where id = any(array(
        select id from batched_git_ref_updates_deletions
        where status = 2 and processed_at < %(horizon)s
        limit %(limit)s
        for update skip locked
    )) and status = 2
"""


class DeletionStatus(IntEnum):
    """What has become of a request to delete a ref."""

    PENDING = 1
    PROCESSED = 2
    REJECTED = 3


class Project(Base):
    """A project and where its bare repository lies below the repositories' root."""

    id = pw.BigIntegerField(primary_key=True)
    disk_path = pw.TextField(unique=True)

    class Meta:
        table_name = "projects"


class GitRefDeletion(Base):
    """A ref that its project wants deleted.  No foreign key: the project may go first."""

    id = BigIdentityField()
    project_id = pw.BigIntegerField()
    ref = pw.TextField()
    expected_oid = pw.TextField(null=True)
    status = pw.SmallIntegerField(constraints=default("1"))
    reason = pw.TextField(null=True)
    created_at = DateTimeTZField(constraints=default("now()"))
    updated_at = DateTimeTZField(constraints=default("now()"))
    processed_at = DateTimeTZField(null=True)

    class Meta:
        table_name = "batched_git_ref_updates_deletions"

    @classmethod
    def delete_processed(cls, horizon: datetime, *, limit: int) -> int:
        """Delete up to *limit* deletions processed before *horizon*; return how many."""
        count: int = database.execute_sql(DELETE_PROCESSED, {"horizon": horizon, "limit": limit}).rowcount
        return count


GitRefDeletion.add_index(
    pw.SQL(
        "create index batched_git_ref_updates_deletions_pending"
        " on batched_git_ref_updates_deletions (project_id, id) where status = 1"
    )
)
GitRefDeletion.add_index(
    pw.SQL(
        "create index batched_git_ref_updates_deletions_processed"
        " on batched_git_ref_updates_deletions (processed_at) where status = 2"
    )
)
