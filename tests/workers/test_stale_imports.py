"""Batch 65 against a real PostgreSQL, with imports that are being finished meanwhile."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from structlog.testing import capture_logs

from forgekeeper.ledger.notices import Notice
from forgekeeper.platform.database import database, now
from models import STALE_AFTER, BulkImport, BulkImportEntity, ImportStatus, TrackerStatus
from tests.harness.bulk_imports import (
    ADD_ENTITIES,
    ADD_IMPORTS,
    ADD_TRACKERS,
    add_stale,
    ago,
    both_kinds,
    by_status,
    cleanup_stale,
    entity,
    failing_changes,
    run,
    status_of,
    tracker_statuses,
)
from tests.harness.clocks import Crash, clock, crash
from tests.harness.tables import somebody_waits_for_a_lock, wait_for_locks
from tests.harness.waiting import wait_until
from workers.stale_imports import MAX_RUNTIME, PAGE_SIZE, StaleImportsResult

UNFINISHED = {ImportStatus.CREATED, ImportStatus.STARTED}
UNFINISHED_TRACKERS = {TrackerStatus.CREATED, TrackerStatus.STARTED, TrackerStatus.ENQUEUED}
LIMIT = 60.0


pytestmark = pytest.mark.usefixtures("database")


def bulk_import(*, status=ImportStatus.STARTED, updated_at=None):
    return BulkImport.create(user_id=1, status=status, updated_at=updated_at or ago(days=2)).id


def make(kind, **options):
    return {"bulk_import": bulk_import, "entity": entity}[kind.record](**options)


def run_in_a_thread():
    with database.connection_context():
        wait_for_locks()
        return run()


# What is timed out


@both_kinds
@pytest.mark.parametrize("status", ImportStatus)
def test_only_a_created_or_started_record_is_timed_out(kind, table, seed, status):
    record = make(kind, status=status)

    run()

    assert status_of(kind.model, record) == (ImportStatus.TIMEOUT if status in UNFINISHED else status)


@pytest.mark.parametrize("status", TrackerStatus)
def test_only_a_created_started_or_enqueued_tracker_is_timed_out(status):
    record = entity(trackers=[status])

    run()

    expected = TrackerStatus.TIMEOUT if status in UNFINISHED_TRACKERS else status
    assert tracker_statuses(record) == [expected]


@pytest.mark.parametrize("status", [ImportStatus.STARTED, ImportStatus.FINISHED, ImportStatus.FAILED])
def test_an_import_that_is_timed_out_has_the_failures_of_its_entities(status):
    failing, another, failed_before = (bulk_import(updated_at=ago(days=2)) for _ in range(3))
    fresh = bulk_import(updated_at=ago(hours=1))
    BulkImport.update(has_failures=True).where(BulkImport.id == failed_before).execute()
    for number, has_failures in ((failing, True), (failing, False), (another, False), (fresh, True)):
        entity(status=status, updated_at=ago(hours=1), bulk_import_id=number, has_failures=has_failures)

    run()

    has_failures = {row.id: row.has_failures for row in BulkImport.select()}
    assert has_failures == {failing: True, another: False, failed_before: True, fresh: False}


def test_an_import_that_is_timed_out_leaves_a_notice_for_what_mails_its_user():
    import_ = BulkImport.create(user_id=7, updated_at=now() - STALE_AFTER - timedelta(seconds=1))
    BulkImport.create(user_id=8)

    run()

    found = Notice.select(Notice.batch, Notice.record, Notice.key, Notice.detail)
    assert list(found.tuples()) == [("stale_imports", "bulk_import", str(import_.id), {"user_id": 7})]


def test_a_run_ends_at_its_deadline_after_a_full_page():
    add_stale(ADD_IMPORTS, 2 * PAGE_SIZE)

    outcome = run(clock=clock(MAX_RUNTIME.total_seconds()))

    assert outcome == StaleImportsResult(imports=PAGE_SIZE, stopped="deadline")


# Must not happen: one record that raises blocks every later one


@both_kinds
def test_a_record_that_raises_keeps_no_other(kind, table, seed):
    add_stale(seed, PAGE_SIZE + 1)

    with failing_changes(table, 3):
        outcome = run()

    assert (outcome.imports + outcome.entities, outcome.failed, outcome.skipped) == (PAGE_SIZE, 1, 0)
    assert (outcome.stopped, by_status(table)) == (
        "drained",
        {ImportStatus.STARTED: 1, ImportStatus.TIMEOUT: PAGE_SIZE},
    )


def test_an_entity_with_a_tracker_that_raises_stays_whole_and_keeps_no_other():
    bad, good = (entity(trackers=[TrackerStatus.ENQUEUED] * 3) for _ in range(2))

    with failing_changes("bulk_import_trackers", 2):
        outcome = run()

    assert outcome == StaleImportsResult(entities=1, trackers=3, failed=1)
    assert (status_of(BulkImportEntity, bad), tracker_statuses(bad)) == (ImportStatus.STARTED, [3, 3, 3])
    assert (status_of(BulkImportEntity, good), tracker_statuses(good)) == (ImportStatus.TIMEOUT, [4, 4, 4])


# What it says


def test_a_stale_record_is_said_once_at_error_level():
    number, record = bulk_import(), entity(trackers=[TrackerStatus.STARTED] * 2)

    with capture_logs() as lines:
        run()

    assert lines == [
        {"event": "BulkImport stale", "log_level": "error", "bulk_import_id": number},
        {
            "event": "BulkImports::Entity stale",
            "log_level": "error",
            "bulk_import_entity_id": record,
            "bulk_import_id": 7,
            "bulk_import_entity_type": "project_entity",
            "source_full_path": "group/project",
            "destination_name": "project",
            "destination_namespace": "elsewhere",
        },
    ]


# Races


@both_kinds
@pytest.mark.parametrize(
    "change", ["status = 2", "updated_at = now() - interval '1 minute'"], ids=["finished", "touched"]
)
def test_a_record_that_was_touched_after_it_was_found_is_left_alone(kind, table, seed, other, change):
    add_stale(seed, 3)
    instant = datetime.now(UTC)
    other.execute(f"update {table} set {change} where id = 2")
    other.connection.commit()

    timed_out = cleanup_stale(kind, instant, [1, 2, 3])

    assert (len(timed_out), status_of(kind.model, 2) == ImportStatus.TIMEOUT) == (2, False)


def everything():
    tables = ("bulk_imports", "bulk_import_entities", "bulk_import_trackers")
    return [database.execute_sql(f"select id, status from {table} order by id").fetchall() for table in tables]


# How it ends


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
def test_a_run_counts_a_record_that_finished_after_it_was_found_as_skipped(kind, table, seed, other):
    add_stale(seed, 3)
    # Lets the run read, and makes it wait where it wants to write.
    other.execute(f"lock table {table} in share mode")

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_in_a_thread)
        waited = wait_until(somebody_waits_for_a_lock, LIMIT)
        other.execute(f"update {table} set status = 2 where id = 2")
        other.connection.commit()
        outcome = running.result()

    assert waited
    assert (outcome.imports + outcome.entities, outcome.skipped, outcome.failed) == (2, 1, 0)
    assert status_of(kind.model, 2) == ImportStatus.FINISHED


# Must not happen: half an entity


def test_an_entity_with_a_locked_tracker_stays_whole_and_keeps_no_other(other):
    locked, free = (entity(trackers=[TrackerStatus.STARTED] * 3) for _ in range(2))
    other.execute("select 1 from bulk_import_trackers where bulk_import_entity_id = %s limit 1 for update", (locked,))

    outcome = run()

    assert outcome == StaleImportsResult(entities=1, trackers=3, failed=1)
    assert (status_of(BulkImportEntity, locked), tracker_statuses(locked)) == (ImportStatus.STARTED, [1, 1, 1])
    assert (status_of(BulkImportEntity, free), tracker_statuses(free)) == (ImportStatus.TIMEOUT, [4, 4, 4])


def test_a_tracker_that_finishes_while_its_entity_is_waited_for_stays_finished(other):
    record = entity(trackers=[TrackerStatus.STARTED] * 2)
    other.execute("update bulk_import_trackers set status = 2 where id = 1")

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_in_a_thread)
        waited = wait_until(somebody_waits_for_a_lock, LIMIT)
        other.connection.commit()
        outcome = running.result()

    assert (waited, outcome) == (True, StaleImportsResult(entities=1, trackers=1))
    assert tracker_statuses(record) == [TrackerStatus.FINISHED, TrackerStatus.TIMEOUT]
