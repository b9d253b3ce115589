"""Batch 65 against a real PostgreSQL, with imports that are being finished meanwhile."""

import sys
import time
from datetime import UTC, datetime, timedelta

import pytest
from structlog.testing import capture_logs

from forgekeeper.database import database
from models import BulkImport, BulkImportEntity, ImportStatus, TrackerStatus
from tests.harness.bulk_imports import (
    ADD_ENTITIES,
    ADD_IMPORTS,
    ADD_TRACKERS,
    add_stale,
    ago,
    both_kinds,
    by_status,
    entity,
    run,
    spoilt,
    stale_lines,
    status_of,
    tracker_statuses,
)
from tests.harness.clocks import Clock
from tests.harness.performing import perform
from tests.harness.thorough import examples
from workers.stale_imports import MAX_RUNTIME, PAGE_SIZE, Outcome, stale_imports

NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
DAY = timedelta(hours=24)
MICROSECOND = timedelta(microseconds=1)
UNFINISHED = {ImportStatus.CREATED, ImportStatus.STARTED}
UNFINISHED_TRACKERS = {TrackerStatus.CREATED, TrackerStatus.STARTED, TrackerStatus.ENQUEUED}


pytestmark = pytest.mark.usefixtures("database")


def bulk_import(*, status=ImportStatus.STARTED, updated_at=None):
    return BulkImport.create(user_id=1, status=status, updated_at=updated_at or ago(days=2)).id


def make(kind, **options):
    return {"bulk_import": bulk_import, "entity": entity}[kind.record](**options)


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


def test_the_trackers_of_other_entities_stay_as_they_are():
    entity(trackers=[TrackerStatus.STARTED])
    finished = entity(status=ImportStatus.FINISHED, trackers=[TrackerStatus.STARTED])
    fresh = entity(updated_at=ago(hours=1), trackers=[TrackerStatus.ENQUEUED])

    outcome = run()

    assert outcome == Outcome(entities=1, trackers=1)
    assert (tracker_statuses(finished), tracker_statuses(fresh)) == ([TrackerStatus.STARTED], [TrackerStatus.ENQUEUED])


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


def test_a_run_ends_at_its_deadline_after_a_full_page():
    add_stale(ADD_IMPORTS, 2 * PAGE_SIZE)

    outcome = run(clock=Clock(step=MAX_RUNTIME.total_seconds()))

    assert outcome == Outcome(imports=PAGE_SIZE, stopped="deadline")


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


def test_an_entity_with_a_tracker_that_raises_stays_whole_and_keeps_no_other():
    bad, good = (entity(trackers=[TrackerStatus.ENQUEUED] * 3) for _ in range(2))

    with spoilt("bulk_import_trackers", 2):
        outcome = run()

    assert outcome == Outcome(entities=1, trackers=3, failed=1)
    assert (status_of(BulkImportEntity, bad), tracker_statuses(bad)) == (ImportStatus.STARTED, [3, 3, 3])
    assert (status_of(BulkImportEntity, good), tracker_statuses(good)) == (ImportStatus.TIMEOUT, [4, 4, 4])


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
