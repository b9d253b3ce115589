"""Projects, and the git refs that wait to be deleted from their repositories (batch 58)."""

from __future__ import annotations

from datetime import datetime
from enum import IntEnum

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.database import Base, BigIdentityField, default
from forgekeeper.database.use import SEEN, WORK, Use


class DeletionStatus(IntEnum):
    """What has become of a request to delete a ref."""

    PENDING = 1
    PROCESSED = 2
    REJECTED = 3


class Project(Base):
    """A project and where its bare repository lies below the repositories' root."""

    found_by = ("id",)
    used_by = Use(SEEN)

    id = pw.BigIntegerField(primary_key=True)
    disk_path = pw.TextField(unique=True)

    class Meta:
        table_name = "projects"


class GitRefDeletion(Base):
    """A ref that its project wants deleted.  No foreign key: the project may go first."""

    found_by = ("id", "project_id")
    used_by = Use(SEEN, (("update", ("status", "reason", "updated_at", "processed_at"), WORK), ("delete", (), WORK)))

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
    def pending(cls) -> pw.ModelSelect[GitRefDeletion]:
        """Select the deletions that nobody has made yet."""
        return cls.select().where(cls.status == DeletionStatus.PENDING)

    @classmethod
    def rejected(cls) -> pw.ModelSelect[GitRefDeletion]:
        """Select the deletions that were refused, with their reasons."""
        return cls.select().where(cls.status == DeletionStatus.REJECTED).order_by(cls.id)

    @classmethod
    def processed_before(cls, horizon: datetime) -> pw.ModelSelect[GitRefDeletion]:
        """Select the deletions that were made before *horizon*."""
        return cls.select().where(cls.status == DeletionStatus.PROCESSED, cls.processed_at < horizon)


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
