"""Bulk imports, their entities and trackers (batch 65).

`cleanup_stale` leads from an unfinished state to *timeout*, and from nowhere else: each
is one statement that repeats the whole condition, so whatever moved on meanwhile is left
alone.  Rows that another transaction has locked are being moved on, and are passed over.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import IntEnum
from typing import Any, NamedTuple

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.database import LOWEST, Base, BigIdentityField, chosen, database, default
from forgekeeper.database.use import SEEN, WORK, Use

STALE_AFTER = timedelta(hours=24)

STALE_PAGE = """
    select updated_at::text, id from {table}
    where status in (0, 1) and updated_at < %(horizon)s and (updated_at, id) > (%(updated)s, %(id)s){chosen}
    order by {table}.updated_at, id
    limit %(limit)s
"""
TIME_OUT_IMPORTS = """
    update bulk_imports set status = 3, updated_at = %(now)s
    where id = any(array(
        select id from bulk_imports
        where id = any(%(ids)s) and status in (0, 1) and updated_at < %(horizon)s
        order by id
        for update skip locked
    )) and status in (0, 1) and updated_at < %(horizon)s
    returning id
"""
# The trackers are locked in the order of their ids before any is changed: an importer that
# changes several would otherwise meet us half-way.  Nothing is half: it is one statement.
TIME_OUT_ENTITIES = """
    with claimed as materialized (
        select id from bulk_import_entities
        where id = any(%(ids)s) and status in (0, 1) and updated_at < %(horizon)s
        order by id
        for update skip locked
    ), unfinished as materialized (
        select id from bulk_import_trackers
        where bulk_import_entity_id = any(array(select id from claimed)) and status in (0, 1, 3)
        order by id
        for update
    ), timed_out as (
        update bulk_import_trackers set status = 4, updated_at = %(now)s
        where id = any(array(select id from unfinished)) and status in (0, 1, 3)
        returning bulk_import_entity_id
    )
    update bulk_import_entities as entity set status = 3, updated_at = %(now)s
    where id = any(array(select id from claimed)) and status in (0, 1) and updated_at < %(horizon)s
    returning id, bulk_import_id, source_type, source_full_path, destination_name, destination_namespace,
        (select count(*) from timed_out where bulk_import_entity_id = entity.id)
"""


class Position(NamedTuple):
    """A stale record's place in the order of the partial index; the time as PostgreSQL writes it."""

    updated: str
    id: int


START = Position("-infinity", LOWEST)
ENTITY_FACTS = (
    "bulk_import_entity_id",
    "bulk_import_id",
    "bulk_import_entity_type",
    "source_full_path",
    "destination_name",
    "destination_namespace",
)


@dataclass(frozen=True)
class TimedOut:
    """A record that has been given up: its log line, and how many trackers went with it."""

    message: str
    facts: dict[str, Any]
    trackers: int = 0


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

    RECORD = "bulk_import"

    class Meta:
        table_name = "bulk_imports"

    @classmethod
    def stale(cls, now: datetime) -> pw.ModelSelect[BulkImport]:
        """Select the unfinished imports that nothing has touched for a day."""
        return cls.select().where(cls.status.in_(UNFINISHED), cls.updated_at < now - STALE_AFTER)

    @classmethod
    def stale_page(cls, now: datetime, after: Position, *, limit: int, without: Collection[int] = ()) -> list[Position]:
        """Return the places of the next stale imports beyond *after*, oldest first; none of *without*."""
        return _stale_page("bulk_imports", now, after, limit, without)

    @classmethod
    def still_stale(cls, now: datetime, ids: Sequence[int]) -> set[int]:
        """Return those of *ids* that are stale."""
        return {row.id for row in cls.stale(now).select(cls.id).where(cls.id.in_(list(ids)))}

    @classmethod
    def cleanup_stale(cls, ids: Sequence[int], now: datetime) -> list[TimedOut]:
        """Time those imports out, unless somebody moved them on first; return the ones we did."""
        values = {"ids": list(ids), "now": now, "horizon": now - STALE_AFTER}
        rows = database.execute_sql(TIME_OUT_IMPORTS, values).fetchall()
        return [TimedOut("BulkImport stale", {"bulk_import_id": row[0]}) for row in rows]


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

    RECORD = "entity"

    class Meta:
        table_name = "bulk_import_entities"

    @classmethod
    def stale(cls, now: datetime) -> pw.ModelSelect[BulkImportEntity]:
        """Select the unfinished entities that nothing has touched for a day."""
        return cls.select().where(cls.status.in_(UNFINISHED), cls.updated_at < now - STALE_AFTER)

    @classmethod
    def stale_page(cls, now: datetime, after: Position, *, limit: int, without: Collection[int] = ()) -> list[Position]:
        """Return the places of the next stale entities beyond *after*, oldest first; none of *without*."""
        return _stale_page("bulk_import_entities", now, after, limit, without)

    @classmethod
    def still_stale(cls, now: datetime, ids: Sequence[int]) -> set[int]:
        """Return those of *ids* that are stale."""
        return {row.id for row in cls.stale(now).select(cls.id).where(cls.id.in_(list(ids)))}

    @classmethod
    def cleanup_stale(cls, ids: Sequence[int], now: datetime) -> list[TimedOut]:
        """Time those entities out, each with its unfinished trackers or not at all.

        Returns the ones we did; what somebody moved on first is not among them.  Raises
        `peewee.OperationalError` when a tracker stays locked.
        """
        values = {"ids": list(ids), "now": now, "horizon": now - STALE_AFTER}
        rows = database.execute_sql(TIME_OUT_ENTITIES, values).fetchall()
        return [TimedOut("BulkImports::Entity stale", _entity_facts(row), row[-1]) for row in rows]


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


def _stale_page(table: str, now: datetime, after: Position, limit: int, without: Collection[int]) -> list[Position]:
    values = {"horizon": now - STALE_AFTER, "limit": limit, "without": list(without), **after._asdict()}
    statement = STALE_PAGE.format(table=table, chosen=chosen("id", without=without))
    return [Position(*row) for row in database.execute_sql(statement, values).fetchall()]


def _entity_facts(row: Sequence[Any]) -> dict[str, Any]:
    facts = dict(zip(ENTITY_FACTS, row, strict=False))
    number = facts["bulk_import_entity_type"]
    known = {member.value: member.name.lower() for member in EntityType}
    return facts | {"bulk_import_entity_type": known.get(number, number)}
