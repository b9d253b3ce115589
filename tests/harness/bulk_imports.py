"""Bulk imports: what tests of them share."""

from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta

import psycopg2
import pytest

from forgekeeper.boot import load
from forgekeeper.database import database
from forgekeeper.runs.deadline import Deadline
from models import BulkImportEntity, BulkImportTracker, ImportStatus
from tests.harness.changing import ENTITIES, IMPORTS
from tests.harness.performing import perform
from workers.stale_imports import MAX_RUNTIME, stale_imports

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

FUNCTION = """
    create function spoil() returns trigger language plpgsql as $$
    begin
        if new.id between {first} and {last} then {act}; end if;
        return new;
    end $$
"""

KINDS = [(IMPORTS, "bulk_imports", ADD_IMPORTS), (ENTITIES, "bulk_import_entities", ADD_ENTITIES)]

both_kinds = pytest.mark.parametrize(("kind", "table", "seed"), KINDS, ids=["imports", "entities"])


def ago(**duration):
    return datetime.now(UTC) - timedelta(**duration)


def entity(*, status=ImportStatus.STARTED, updated_at=None, trackers=()):
    """Add an entity with a tracker in each of these statuses."""
    created = BulkImportEntity.create(
        bulk_import_id=7,
        source_type=1,
        source_full_path="group/project",
        destination_name="project",
        destination_namespace="elsewhere",
        status=status,
        updated_at=updated_at or ago(days=2),
    )
    for tracker_status in trackers:
        BulkImportTracker.create(bulk_import_entity_id=created.id, relation="issues", status=tracker_status)
    return created.id


def add_stale(statement, count, *, first=1, **options):
    """Add stale records; the higher the id, the later they were touched."""
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


def stale_lines(lines):
    return [line for line in lines if line["event"] in ("BulkImport stale", "BulkImports::Entity stale")]


@contextmanager
def spoilt(table, record, act="raise exception 'spoilt'", *, last=None, at_commit=False):
    """Let every change of the record, or of all up to the *last*, end in an error."""
    when = "constraint trigger spoil after" if at_commit else "trigger spoil before"
    deferred = "deferrable initially deferred" if at_commit else ""
    database.execute_sql(FUNCTION.format(first=record, last=last or record, act=act))
    database.execute_sql(f"create {when} update on {table} {deferred} for each row execute function spoil()")
    try:
        yield
    finally:
        # On a connection of its own: the record may have cost us ours.
        with (
            closing(psycopg2.connect(load().require_database())) as connection,
            connection,
            connection.cursor() as cursor,
        ):
            cursor.execute("drop function spoil cascade")
