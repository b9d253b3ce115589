"""Bulk imports and entities, the two kinds of records of batch 65, for tests."""

from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import pytest

from forgekeeper.audit.deletions import Audit
from forgekeeper.engine.rows import execute_change
from forgekeeper.engine.run import Run
from forgekeeper.guards.deadline import Deadline
from forgekeeper.platform.database import database
from forgekeeper.platform.database.targets import TargetRelation
from models import BulkImport, BulkImportEntity, BulkImportTracker, ImportStatus
from tests.harness.performing import perform
from tests.harness.settings import settings_with
from tests.harness.tables import before_each
from workers.stale_imports import MAX_RUNTIME, find_stale_entities, find_stale_imports, stale_imports

ADD_IMPORTS = """
    insert into bulk_imports (id, user_id, status, updated_at)
    select id, 1, mod(id, 2), now() - interval '3 days' + id * interval '1 millisecond'
    from generate_series({first}, {last}) as id
"""
ADD_ENTITIES = """
    insert into bulk_import_entities
        (id, bulk_import_id, source_full_path, destination_name, destination_namespace, status, updated_at)
    select id, 1, 'group/' || id, 'name', 'space', mod(id, 2), now() - interval '3 days' + id * interval '1 millisecond'
    from generate_series({first}, {last}) as id
"""
ADD_TRACKERS = """
    insert into bulk_import_trackers (bulk_import_entity_id, relation, stage, status)
    select entity, 'relation', number, (array[0, 1, 3])[1 + mod(number, 3)]
    from generate_series({first}, {last}) as entity, generate_series(1, {each}) as number
"""


class ImportKind(NamedTuple):
    """A kind of record that the batch sets to timeout, and the function that returns its due records."""

    record: str
    model: type
    answer: object


IMPORTS = ImportKind("bulk_import", BulkImport, find_stale_imports)
ENTITIES = ImportKind("entity", BulkImportEntity, find_stale_entities)
KINDS = [(IMPORTS, "bulk_imports", ADD_IMPORTS), (ENTITIES, "bulk_import_entities", ADD_ENTITIES)]
both_kinds = pytest.mark.parametrize(("kind", "table", "seed"), KINDS, ids=["imports", "entities"])


def ago(**duration):
    return datetime.now(UTC) - timedelta(**duration)


def entity(*, status=ImportStatus.STARTED, updated_at=None, trackers=(), **facts):
    """Insert an entity with a tracker for each of the statuses in *trackers*; return its id."""
    created = BulkImportEntity.create(
        source_type=1,
        source_full_path="group/project",
        destination_name="project",
        destination_namespace="elsewhere",
        status=status,
        updated_at=updated_at or ago(days=2),
        **{"bulk_import_id": 7} | facts,
    )
    for tracker_status in trackers:
        BulkImportTracker.create(bulk_import_entity_id=created.id, relation="issues", status=tracker_status)
    return created.id


def add_stale(statement, count, *, first=1, **options):
    """Insert stale records; a higher id has changed later."""
    database.execute_sql(statement.format(first=first, last=first + count - 1, **options))


def by_status(table):
    return dict(database.execute_sql(f"select status, count(*) from {table} group by status").fetchall())


def status_of(model, record):
    return model.get_by_id(record).status


def tracker_statuses(entity_id):
    rows = BulkImportTracker.select().where(BulkImportTracker.bulk_import_entity_id == entity_id)
    return [row.status for row in rows.order_by(BulkImportTracker.id)]


def run(**options):
    return perform(stale_imports, deadline=Deadline(MAX_RUNTIME, **options))


def failing_changes(table, record):
    """Make every update of the record raise an error."""
    return before_each("update", table, f"if new.id = {record} then raise exception 'spoilt'; end if")


def cleanup_stale(kind, now, ids, *, audit=None):
    """Set the records to timeout unless another process has changed them; return the changed rows."""
    run = Run(stale_imports, settings_with(), audit=audit or Audit("a", on=False))
    run.now = now
    return execute_change(run, kind.answer().bind("stale_imports", now), TargetRelation.find(kind.model, "update"), ids)
