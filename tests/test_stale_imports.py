"""Batch 65 against a real PostgreSQL, with imports that are being finished meanwhile."""

import functools
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta

import peewee as pw
import psycopg2
import pytest
from structlog.testing import capture_logs

from forgekeeper import shutdown
from forgekeeper.boot import load
from forgekeeper.database import database
from forgekeeper.runs.deadline import Deadline
from models import BulkImport, BulkImportEntity, BulkImportTracker, ImportStatus, TrackerStatus
from tests.harness.changing import ENTITIES, IMPORTS, cleanup_stale
from tests.harness.clocks import Clock, Crash, crash
from tests.harness.performing import perform
from tests.harness.thorough import examples
from tests.harness.waiting import wait_until
from workers import stale_imports as document
from workers.stale_imports import MAX_RUNTIME, PAGE_SIZE, Outcome, stale_imports

NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
DAY = timedelta(hours=24)
MICROSECOND = timedelta(microseconds=1)
FINISHES = examples(2_000)
LIMIT = 60.0
UNFINISHED = {ImportStatus.CREATED, ImportStatus.STARTED}
UNFINISHED_TRACKERS = {TrackerStatus.CREATED, TrackerStatus.STARTED, TrackerStatus.ENQUEUED}

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
# One that the run will come to next, or is at.
FINISH_ANY = """
    update {table} set status = 2, updated_at = now()
    where id = (
        select id from {table} where status in (0, 1) and updated_at < now() - interval '1 day'
        order by updated_at, id offset %s limit 1
    ) and status in (0, 1)
    returning id
"""
FUNCTION = """
    create function spoil() returns trigger language plpgsql as $$
    begin
        if new.id between {first} and {last} then {act}; end if;
        return new;
    end $$
"""
WAITING_FOR_A_LOCK = "select 1 from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
KINDS = [(IMPORTS, "bulk_imports", ADD_IMPORTS), (ENTITIES, "bulk_import_entities", ADD_ENTITIES)]
both_kinds = pytest.mark.parametrize(("kind", "table", "seed"), KINDS, ids=["imports", "entities"])

pytestmark = pytest.mark.usefixtures("database")


def ago(**duration):
    return datetime.now(UTC) - timedelta(**duration)


def bulk_import(*, status=ImportStatus.STARTED, updated_at=None):
    return BulkImport.create(user_id=1, status=status, updated_at=updated_at or ago(days=2)).id


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


def make(kind, **options):
    return {"bulk_import": bulk_import, "entity": entity}[kind.record](**options)


def status_of(model, record):
    return model.get_by_id(record).status


def tracker_statuses(entity_id):
    rows = BulkImportTracker.select().where(BulkImportTracker.bulk_import_entity_id == entity_id)
    return [row.status for row in rows.order_by(BulkImportTracker.id)]


def everything():
    tables = ("bulk_imports", "bulk_import_entities", "bulk_import_trackers")
    return [database.execute_sql(f"select id, status from {table} order by id").fetchall() for table in tables]


def run(**options):
    return perform(stale_imports, deadline=Deadline(MAX_RUNTIME, **options))


def run_in_a_thread(**options):
    with database.connection_context():
        return run(**options)


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


# What is timed out


def test_with_nothing_to_do_nothing_is_done():
    assert run() == Outcome(imports=0, entities=0, trackers=0, skipped=0, failed=0, stopped="drained")


around_a_day = pytest.mark.parametrize(
    ("idle", "stale"),
    [(DAY + MICROSECOND, True), (DAY, False), (DAY - MICROSECOND, False)],
    ids=["a microsecond more than a day", "exactly a day", "a microsecond less"],
)


@both_kinds
@around_a_day
def test_a_record_is_stale_after_more_than_a_day(kind, table, seed, idle, stale):
    make(kind, updated_at=NOON - idle)

    counted = kind.model.stale(NOON).count()
    outcome = perform(stale_imports, now=NOON)

    assert (counted, outcome.imports + outcome.entities) == (stale, stale)


@both_kinds
@around_a_day
def test_no_other_record_is_timed_out_though_somebody_takes_it_for_stale(kind, table, seed, idle, stale):
    record = make(kind, updated_at=NOON - idle)

    assert len(cleanup_stale(kind, NOON, [record])) == stale


@pytest.mark.parametrize("status", ImportStatus)
def test_only_a_created_or_started_import_is_timed_out(status):
    record = bulk_import(status=status)

    run()

    assert status_of(BulkImport, record) == (ImportStatus.TIMEOUT if status in UNFINISHED else status)


@pytest.mark.parametrize("status", ImportStatus)
def test_only_a_created_or_started_entity_is_timed_out(status):
    record = entity(status=status)

    run()

    assert status_of(BulkImportEntity, record) == (ImportStatus.TIMEOUT if status in UNFINISHED else status)


@pytest.mark.parametrize("status", TrackerStatus)
def test_only_a_created_started_or_enqueued_tracker_is_timed_out(status):
    record = entity(trackers=[status])

    run()

    expected = TrackerStatus.TIMEOUT if status in UNFINISHED_TRACKERS else status
    assert tracker_statuses(record) == [expected]


def test_of_each_entity_it_is_said_how_many_trackers_went_with_it():
    numbers = [entity(trackers=[TrackerStatus.STARTED] * count) for count in (3, 0, 1)]

    timed_out = cleanup_stale(ENTITIES, datetime.now(UTC), numbers)

    assert {row[0]: row[-1] for row in timed_out} == dict(zip(numbers, (3, 0, 1), strict=True))


def test_the_trackers_of_other_entities_stay_as_they_are():
    entity(trackers=[TrackerStatus.STARTED])
    finished = entity(status=ImportStatus.FINISHED, trackers=[TrackerStatus.STARTED])
    fresh = entity(updated_at=ago(hours=1), trackers=[TrackerStatus.ENQUEUED])

    outcome = run()

    assert outcome == Outcome(entities=1, trackers=1)
    assert (tracker_statuses(finished), tracker_statuses(fresh)) == ([TrackerStatus.STARTED], [TrackerStatus.ENQUEUED])


def test_the_entities_of_a_stale_import_are_left_alone_while_they_are_touched():
    bulk_import()
    fresh = entity(updated_at=ago(hours=1))

    run()

    assert status_of(BulkImportEntity, fresh) == ImportStatus.STARTED


@pytest.mark.parametrize("status", [ImportStatus.STARTED, ImportStatus.FINISHED, ImportStatus.FAILED])
def test_an_import_that_is_timed_out_has_the_failures_of_its_entities(status):
    failing, another, failed_before = (bulk_import(updated_at=ago(days=2)) for _ in range(3))
    fresh = bulk_import(updated_at=ago(hours=1))
    BulkImport.update(has_failures=True).where(BulkImport.id == failed_before).execute()
    for number, has_failures in ((failing, True), (failing, False), (another, False), (fresh, True)):
        one = entity(status=status, updated_at=ago(hours=1))
        BulkImportEntity.update(bulk_import_id=number, has_failures=has_failures).where(
            BulkImportEntity.id == one
        ).execute()

    run()

    has_failures = {row.id: row.has_failures for row in BulkImport.select()}
    assert has_failures == {failing: True, another: False, failed_before: True, fresh: False}


def test_what_is_timed_out_is_touched():
    record = bulk_import()
    before = datetime.now(UTC)

    run()

    assert BulkImport.get_by_id(record).updated_at >= before


@both_kinds
def test_the_oldest_come_first(kind, table, seed, monkeypatch):
    monkeypatch.setattr(document, "PAGE_SIZE", 2)
    records = {hours: make(kind, updated_at=ago(hours=hours)) for hours in (30, 50, 40, 60)}

    run(clock=Clock(step=MAX_RUNTIME.total_seconds()))

    assert {row.id for row in kind.model.select() if row.status == ImportStatus.TIMEOUT} == {records[60], records[50]}


@both_kinds
@pytest.mark.parametrize("count", [PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 2 * PAGE_SIZE + 1])
def test_a_run_takes_as_many_pages_as_it_needs(kind, table, seed, count):
    add_stale(seed, count)

    outcome = run()

    assert (outcome.imports + outcome.entities, by_status(table)) == (count, {ImportStatus.TIMEOUT: count})


@both_kinds
def test_of_equally_old_ones_none_is_forgotten_between_two_pages(kind, table, seed):
    add_stale(seed, 2 * PAGE_SIZE + 1)
    database.execute_sql(f"update {table} set updated_at = now() - interval '2 days'")

    run()

    assert by_status(table) == {ImportStatus.TIMEOUT: 2 * PAGE_SIZE + 1}


def test_a_run_that_is_done_twice_ends_as_if_done_once():
    bulk_import()
    entity(trackers=[TrackerStatus.STARTED])
    run()

    outcome = run()

    assert outcome == Outcome()


# How it ends


def test_a_run_ends_at_its_deadline_after_a_full_page():
    add_stale(ADD_IMPORTS, 2 * PAGE_SIZE)

    outcome = run(clock=Clock(step=MAX_RUNTIME.total_seconds()))

    assert outcome == Outcome(imports=PAGE_SIZE, stopped="deadline")


def test_a_deadline_between_imports_and_entities_leaves_the_entities_to_the_next_run():
    bulk_import()
    entity()
    first = run(clock=Clock(step=MAX_RUNTIME.total_seconds()))

    second = run()

    assert (first, second) == (Outcome(imports=1, stopped="deadline"), Outcome(entities=1))


def test_a_run_goes_on_until_its_deadline():
    add_stale(ADD_IMPORTS, 4 * PAGE_SIZE)

    outcome = run(clock=Clock(step=MAX_RUNTIME.total_seconds() / 3))

    assert outcome == Outcome(imports=3 * PAGE_SIZE, stopped="deadline")


def test_a_run_that_is_asked_to_stop_ends_after_its_page():
    add_stale(ADD_IMPORTS, 2 * PAGE_SIZE)
    add_stale(ADD_ENTITIES, PAGE_SIZE)
    shutdown.requested.set()
    try:
        outcome = run()
    finally:
        shutdown.requested.clear()

    assert outcome == Outcome(imports=PAGE_SIZE, stopped="deadline")


def test_a_run_that_crashes_has_timed_out_whole_pages():
    add_stale(ADD_IMPORTS, 2 * PAGE_SIZE)

    with pytest.raises(Crash):
        run(safe_point=crash)

    assert Counter(by_status("bulk_imports"))[ImportStatus.TIMEOUT] == PAGE_SIZE


def test_a_run_after_a_crash_ends_as_if_there_had_been_none():
    def begin():
        database.execute_sql("truncate bulk_imports, bulk_import_entities, bulk_import_trackers restart identity")
        add_stale(ADD_IMPORTS, PAGE_SIZE + 1)
        add_stale(ADD_ENTITIES, PAGE_SIZE + 1)
        add_stale(ADD_TRACKERS, PAGE_SIZE + 1, each=4)

    begin()
    run()
    undisturbed = everything()
    begin()
    for _ in range(4):
        with pytest.raises(Crash):
            run(safe_point=crash)
    run()

    assert everything() == undisturbed


@both_kinds
def test_two_runs_at_once_time_nothing_out_twice(kind, table, seed):
    add_stale(seed, 20 * PAGE_SIZE)
    together = threading.Barrier(2, timeout=LIMIT)

    def run_beside_another():
        return run_in_a_thread(safe_point=functools.cache(lambda: together.wait() * 0))

    with capture_logs() as lines, ThreadPoolExecutor(2) as pool:
        outcomes = [each.result() for each in [pool.submit(run_beside_another) for _ in range(2)]]

    assert sum(outcome.imports + outcome.entities for outcome in outcomes) == 20 * PAGE_SIZE
    assert len(stale_lines(lines)) == 20 * PAGE_SIZE
    assert by_status(table) == {ImportStatus.TIMEOUT: 20 * PAGE_SIZE}


def test_a_database_that_goes_down_between_two_pages_ends_the_run_with_an_operational_error(other):
    add_stale(ADD_IMPORTS, 2 * PAGE_SIZE)
    server = database.connection().info.backend_pid

    with pytest.raises(pw.OperationalError):
        run(safe_point=lambda: other.execute("select pg_terminate_backend(%s, 10000)", (server,)))

    other.execute("select count(*) from bulk_imports where status = 3")
    assert other.fetchone() == (PAGE_SIZE,)


@both_kinds
def test_a_connection_that_breaks_at_a_record_ends_the_run_with_an_operational_error(kind, table, seed, other):
    add_stale(seed, 3)

    with (
        spoilt(table, 2, "perform pg_terminate_backend(pg_backend_pid())"),
        pytest.raises(pw.OperationalError),
    ):
        run()

    other.execute(f"select count(*) from {table} where status = 3")
    assert other.fetchone() == (0,)


# Must not happen: an import that finishes between SELECT and UPDATE is timed out


@both_kinds
def test_a_record_that_finished_after_it_was_found_is_left_alone(kind, table, seed, other):
    add_stale(seed, 3)
    instant = datetime.now(UTC)
    other.execute(f"update {table} set status = 2 where id = 2")
    other.connection.commit()

    timed_out = cleanup_stale(kind, instant, [1, 2, 3])

    assert (len(timed_out), status_of(kind.model, 2)) == (2, ImportStatus.FINISHED)


@both_kinds
def test_a_record_that_was_touched_after_it_was_found_is_left_alone(kind, table, seed, other):
    add_stale(seed, 3)
    instant = datetime.now(UTC)
    other.execute(f"update {table} set updated_at = now() where id = 1")
    other.connection.commit()

    timed_out = cleanup_stale(kind, instant, [1, 2, 3])

    assert (len(timed_out), status_of(kind.model, 1)) == (2, ImportStatus.STARTED)


@both_kinds
def test_a_run_counts_a_record_that_finished_after_it_was_found_as_skipped(kind, table, seed, other):
    add_stale(seed, 3)
    # Lets the run read, and makes it wait where it wants to write.
    other.execute(f"lock table {table} in share mode")

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_in_a_thread)
        waited = wait_until(lambda: bool(database.execute_sql(WAITING_FOR_A_LOCK).fetchone()), LIMIT)
        other.execute(f"update {table} set status = 2 where id = 2")
        other.connection.commit()
        outcome = running.result()

    assert waited
    assert (outcome.imports + outcome.entities, outcome.skipped, outcome.failed) == (2, 1, 0)
    assert status_of(kind.model, 2) == ImportStatus.FINISHED


@both_kinds
def test_a_record_that_is_being_finished_is_skipped(kind, table, seed, other):
    add_stale(seed, 3)
    other.execute(f"update {table} set status = 2 where id = 2")

    outcome = run()

    assert (outcome.imports + outcome.entities, outcome.skipped, outcome.failed) == (2, 1, 0)


@both_kinds
def test_a_run_goes_on_behind_locked_records(kind, table, seed, other):
    add_stale(seed, 250)
    other.execute(f"select 1 from {table} where id <= 150 for update")

    outcome = run()

    assert (outcome.imports + outcome.entities, outcome.skipped, outcome.stopped) == (100, 150, "drained")


@both_kinds
def test_records_that_were_locked_are_timed_out_by_the_next_run(kind, table, seed, other):
    add_stale(seed, 250)
    other.execute(f"select 1 from {table} where id <= 150 for update")
    run()
    other.connection.rollback()

    outcome = run()

    assert outcome.imports + outcome.entities == 150
    assert by_status(table) == {ImportStatus.TIMEOUT: 250}


@both_kinds
def test_records_finished_in_thousands_of_interleavings_all_stay_finished(kind, table, seed, urls):
    finished, too_late = set(), []
    running, ended = threading.Event(), threading.Event()
    added = timed_out = 0

    def finish():
        with closing(psycopg2.connect(urls.database)) as connection, connection.cursor() as cursor:
            connection.autocommit = True
            while not ended.is_set():
                running.wait(1)
                cursor.execute(FINISH_ANY.format(table=table), (random.randrange(2 * PAGE_SIZE),))
                row = cursor.fetchone()
                if row is None:
                    too_late.append(1)
                else:
                    finished.add(row[0])

    with capture_logs(), ThreadPoolExecutor(2) as pool:
        users = [pool.submit(finish) for _ in range(2)]
        try:
            while len(finished) < FINISHES and not any(user.done() for user in users):
                add_stale(seed, 5_000, first=added + 1)
                if kind is ENTITIES:
                    add_stale(ADD_TRACKERS, 5_000, first=added + 1, each=1)
                added += 5_000
                running.set()
                outcome = run()
                running.clear()
                timed_out += outcome.imports + outcome.entities
        finally:
            ended.set()
            running.set()
        for user in users:
            user.result()
        last = run()
        timed_out += last.imports + last.entities

    statuses = dict(database.execute_sql(f"select id, status from {table}").fetchall())
    assert len(finished) >= FINISHES
    assert too_late, "nobody ever came too late: the run and the users were not at the same rows"
    assert {record for record, status in statuses.items() if status == ImportStatus.FINISHED} == finished
    assert sum(status == ImportStatus.TIMEOUT for status in statuses.values()) == timed_out == added - len(finished)


# Must not happen: one record that raises blocks every later one


@both_kinds
def test_a_record_that_raises_keeps_no_other(kind, table, seed):
    add_stale(seed, PAGE_SIZE + 1)

    with spoilt(table, 3):
        outcome = run()

    assert (outcome.imports + outcome.entities, outcome.failed, outcome.skipped) == (PAGE_SIZE, 1, 0)
    assert (outcome.stopped, by_status(table)) == (
        "drained",
        {ImportStatus.STARTED: 1, ImportStatus.TIMEOUT: PAGE_SIZE},
    )


@both_kinds
def test_a_record_that_raises_is_logged_with_its_id(kind, table, seed):
    add_stale(seed, 5)

    with spoilt(table, 3), capture_logs() as lines:
        run()

    (line,) = [line for line in lines if line["event"] == "record failed"]
    assert (line["log_level"], line["record"], line["id"]) == ("error", kind.record, 3)


@both_kinds
def test_a_record_that_raised_is_timed_out_once_it_can_be(kind, table, seed):
    add_stale(seed, 5)
    with spoilt(table, 3):
        run()

    outcome = run()

    assert (outcome.imports + outcome.entities, by_status(table)) == (1, {ImportStatus.TIMEOUT: 5})


def test_a_whole_page_that_raises_keeps_no_later_one():
    add_stale(ADD_IMPORTS, PAGE_SIZE + 10)

    with spoilt("bulk_imports", 1, last=PAGE_SIZE), capture_logs():
        outcome = run()

    assert outcome == Outcome(imports=10, failed=PAGE_SIZE)


# Must not happen: half an entity


def test_an_entity_with_a_locked_tracker_stays_whole_and_keeps_no_other(other):
    locked, free = (entity(trackers=[TrackerStatus.STARTED] * 3) for _ in range(2))
    other.execute("select 1 from bulk_import_trackers where bulk_import_entity_id = %s limit 1 for update", (locked,))

    outcome = run()

    assert outcome == Outcome(entities=1, trackers=3, failed=1)
    assert (status_of(BulkImportEntity, locked), tracker_statuses(locked)) == (ImportStatus.STARTED, [1, 1, 1])
    assert (status_of(BulkImportEntity, free), tracker_statuses(free)) == (ImportStatus.TIMEOUT, [4, 4, 4])


def test_an_entity_with_a_tracker_that_raises_stays_whole_and_keeps_no_other():
    bad, good = (entity(trackers=[TrackerStatus.ENQUEUED] * 3) for _ in range(2))

    with spoilt("bulk_import_trackers", 2):
        outcome = run()

    assert outcome == Outcome(entities=1, trackers=3, failed=1)
    assert (status_of(BulkImportEntity, bad), tracker_statuses(bad)) == (ImportStatus.STARTED, [3, 3, 3])
    assert (status_of(BulkImportEntity, good), tracker_statuses(good)) == (ImportStatus.TIMEOUT, [4, 4, 4])


def test_an_entity_that_raises_leaves_its_trackers_as_they_are():
    bad = entity(trackers=[TrackerStatus.CREATED] * 3)

    with spoilt("bulk_import_entities", bad, at_commit=True):
        outcome = run()

    assert (outcome, tracker_statuses(bad)) == (Outcome(failed=1), [0, 0, 0])


def test_the_trackers_of_an_entity_that_is_being_finished_stay_as_they_are(other):
    record = entity(trackers=[TrackerStatus.STARTED])
    other.execute("update bulk_import_entities set status = 2")

    outcome = run()

    assert (outcome, tracker_statuses(record)) == (Outcome(skipped=1), [TrackerStatus.STARTED])


def test_a_tracker_that_finishes_while_its_entity_is_waited_for_stays_finished(other):
    record = entity(trackers=[TrackerStatus.STARTED] * 2)
    other.execute("update bulk_import_trackers set status = 2 where id = 1")

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_in_a_thread)
        waited = wait_until(lambda: bool(database.execute_sql(WAITING_FOR_A_LOCK).fetchone()), LIMIT)
        other.connection.commit()
        outcome = running.result()

    assert (waited, outcome) == (True, Outcome(entities=1, trackers=1))
    assert tracker_statuses(record) == [TrackerStatus.FINISHED, TrackerStatus.TIMEOUT]


# What it says


def test_a_stale_import_is_said_once_at_error_level():
    record = bulk_import()

    with capture_logs() as lines:
        run()

    assert lines == [{"event": "BulkImport stale", "log_level": "error", "bulk_import_id": record}]


def test_a_stale_entity_is_said_once_at_error_level_with_its_source_and_destination():
    record = entity(trackers=[TrackerStatus.STARTED] * 2)

    with capture_logs() as lines:
        run()

    assert lines == [
        {
            "event": "BulkImports::Entity stale",
            "log_level": "error",
            "bulk_import_entity_id": record,
            "bulk_import_id": 7,
            "bulk_import_entity_type": "project_entity",
            "source_full_path": "group/project",
            "destination_name": "project",
            "destination_namespace": "elsewhere",
        }
    ]


def test_every_record_is_said_once():
    add_stale(ADD_IMPORTS, PAGE_SIZE + 1)
    add_stale(ADD_ENTITIES, PAGE_SIZE + 1)
    add_stale(ADD_TRACKERS, PAGE_SIZE + 1, each=3)

    with capture_logs() as lines:
        run()

    said = Counter((line["event"], line.get("bulk_import_entity_id", line["bulk_import_id"])) for line in lines)
    records = range(1, PAGE_SIZE + 2)
    assert said == {(event, id_): 1 for event in ("BulkImport stale", "BulkImports::Entity stale") for id_ in records}


@both_kinds
def test_a_record_whose_commit_failed_is_not_called_stale(kind, table, seed):
    add_stale(seed, 3)

    with spoilt(table, 2, at_commit=True), capture_logs() as lines:
        outcome = run()

    assert (outcome.imports + outcome.entities, outcome.failed) == (2, 1)
    assert len(stale_lines(lines)) == 2


@both_kinds
def test_a_skipped_record_is_not_called_stale(kind, table, seed, other):
    add_stale(seed, 1)
    other.execute(f"select 1 from {table} for update")

    with capture_logs() as lines:
        run()

    assert lines == []


# How long it takes


def test_ten_thousand_imports_and_ten_thousand_entities_with_twenty_trackers_each_end_within_the_budget(capfd):
    count = examples(10_000)
    add_stale(ADD_IMPORTS, count)
    add_stale(ADD_ENTITIES, count)
    add_stale(ADD_TRACKERS, count, each=20)
    database.execute_sql("analyze bulk_imports, bulk_import_entities, bulk_import_trackers")
    began = time.monotonic()

    with capture_logs() as lines:
        outcome = run()

    seconds = time.monotonic() - began
    with capfd.disabled():
        sys.stdout.write(f"\n{count:,} imports and entities and {20 * count:,} trackers timed out in {seconds:.1f} s\n")
    assert outcome == Outcome(imports=count, entities=count, trackers=20 * count)
    assert seconds < MAX_RUNTIME.total_seconds()
    assert len(stale_lines(lines)) == 2 * count
    assert by_status("bulk_import_trackers") == {TrackerStatus.TIMEOUT: 20 * count}
