"""Bulk imports, their entities and trackers (batch 65)."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import IntEnum

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.database import Base, BigIdentityField, default
from forgekeeper.database.use import SEEN, WORK, Use

STALE_AFTER = timedelta(hours=24)


class ImportStatus(IntEnum):
    """How far an import or an entity has got; only entities and imports share these."""

    CREATED = 0
    STARTED = 1
    FINISHED = 2
    TIMEOUT = 3
    FAILED = -1
    CANCELED = -2


class EntityType(IntEnum):
    """What an entity is, as the forge numbers it."""

    GROUP_ENTITY = 0
    PROJECT_ENTITY = 1


class TrackerStatus(IntEnum):
    """How far a tracker has got: the numbers differ from an import's."""

    CREATED = 0
    STARTED = 1
    FINISHED = 2
    ENQUEUED = 3
    TIMEOUT = 4
    FAILED = -1
    SKIPPED = -2
    CANCELED = -3


UNFINISHED = (ImportStatus.CREATED, ImportStatus.STARTED)


class BulkImport(Base):
    """One import of groups and projects from another forge."""

    found_by = ("id",)
    used_by = Use(SEEN, (("update", ("status", "updated_at"), WORK),))

    id = BigIdentityField()
    user_id = pw.BigIntegerField()
    source_type = pw.SmallIntegerField(constraints=default("0"))
    status = pw.SmallIntegerField(constraints=default("0"))
    has_failures = pw.BooleanField(constraints=default("false"))
    created_at = DateTimeTZField(constraints=default("now()"))
    updated_at = DateTimeTZField(constraints=default("now()"))

    class Meta:
        table_name = "bulk_imports"

    @classmethod
    def stale(cls, now: datetime) -> pw.ModelSelect[BulkImport]:
        """Select the unfinished imports that nothing has touched for a day."""
        return cls.select().where(cls.status.in_(UNFINISHED), cls.updated_at < now - STALE_AFTER)


class BulkImportEntity(Base):
    """A group or project within an import."""

    found_by = ("id",)
    used_by = Use(SEEN, (("update", ("status", "updated_at"), WORK),))

    id = BigIdentityField()
    bulk_import_id = pw.BigIntegerField()
    parent_id = pw.BigIntegerField(null=True)
    source_type = pw.SmallIntegerField(constraints=default("0"))
    source_full_path = pw.TextField()
    destination_name = pw.TextField()
    destination_namespace = pw.TextField()
    status = pw.SmallIntegerField(constraints=default("0"))
    has_failures = pw.BooleanField(constraints=default("false"))
    created_at = DateTimeTZField(constraints=default("now()"))
    updated_at = DateTimeTZField(constraints=default("now()"))

    class Meta:
        table_name = "bulk_import_entities"

    @classmethod
    def stale(cls, now: datetime) -> pw.ModelSelect[BulkImportEntity]:
        """Select the unfinished entities that nothing has touched for a day."""
        return cls.select().where(cls.status.in_(UNFINISHED), cls.updated_at < now - STALE_AFTER)


class BulkImportTracker(Base):
    """One relation of an entity on its way through the pipelines."""

    found_by = ("id", "bulk_import_entity_id")
    used_by = Use(WORK, (("update", ("status", "updated_at"), WORK),))

    id = BigIdentityField()
    bulk_import_entity_id = pw.BigIntegerField(index=True)
    relation = pw.TextField()
    stage = pw.SmallIntegerField(constraints=default("0"))
    status = pw.SmallIntegerField(constraints=default("0"))
    created_at = DateTimeTZField(constraints=default("now()"))
    updated_at = DateTimeTZField(constraints=default("now()"))

    class Meta:
        table_name = "bulk_import_trackers"


BulkImport.add_index(
    pw.SQL("create index bulk_imports_unfinished on bulk_imports (updated_at, id) where status in (0, 1)")
)
BulkImportEntity.add_index(
    pw.SQL(
        "create index bulk_import_entities_unfinished on bulk_import_entities (updated_at, id) where status in (0, 1)"
    )
)
