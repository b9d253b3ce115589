"""What a run has done is in its row, its line, the counters and once in the totals, whatever becomes of the run."""

import pytest

from forgekeeper.ledger.heartbeats import LostRun
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.limits import RunTotal
from forgekeeper.platform.failpoints import FailpointReached, arm_failpoints, parse_failpoints
from metrics.instruments import WORKER_METRICS
from models import UserStatus
from tests.harness.every import every
from tests.harness.many_rows import statuses
from tests.harness.performing import attempt_at, child_attempt, run_as_worker, run_attempt, runner_of
from tests.harness.settings import settings_with
from tests.harness.waiting import wait_until
from workers.expired_job_artifacts import delete_artifact_bucket
from workers.user_status_cleanup import BATCH_SIZE, user_status_cleanup

NAME = "user_status_cleanup"
pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def runner(settings):
    with runner_of(settings) as runner:
        yield runner
    arm_failpoints(parse_failpoints(""))


@pytest.fixture
def attempt(runner):
    """Make an attempt at a run; the second time at the one that waits for its retry."""
    return lambda: attempt_at(runner, user_status_cleanup)


def counted():
    labels = {"batch": NAME, "record": "user_status"}
    return WORKER_METRICS.registry.get_sample_value("forgekeeper_records_processed_total", labels) or 0


def fail_after_a_chunk(attempt):
    arm_failpoints(parse_failpoints(f"{NAME}.deleted=raise*1"))
    assert isinstance(run_attempt(attempt).error, FailpointReached)


def test_a_run_that_was_taken_has_counted_what_it_did(attempt):
    statuses(BATCH_SIZE + 1)
    before, taken = counted(), attempt()
    taken.row.note_heartbeat(ours=False)

    run_attempt(taken)

    assert isinstance(taken.error, LostRun)
    assert counted() - before == BATCH_SIZE


def test_the_ledger_says_of_a_run_under_way_what_it_has_done_so_far(settings):
    quick = settings.model_copy(update={"dead_after": settings.dead_after / 15})
    with runner_of(quick) as runner, attempt_at(runner, user_status_cleanup) as running:
        running.run.outcome.deleted, running.run.outcome.batches = 5, 1

        assert wait_until(lambda: JobRun.get_by_id(running.run.number).result == running.result_fields(), limit=60)
    assert running.state == "succeeded"


def test_what_an_earlier_attempt_did_stays_beside_what_the_last_one_did(attempt):
    statuses(BATCH_SIZE + 1)
    fail_after_a_chunk(attempt())

    second = run_attempt(attempt())

    earlier = {"deleted": BATCH_SIZE, "batches": 1, "stopped": "drained"}
    expected = {"deleted": 1, "batches": 1, "stopped": "drained", "earlier": [earlier]}
    row = JobRun.get_by_id(second.run.number).result
    assert {name: value for name, value in row.items() if name != "failures"} == expected


def test_a_run_of_which_nothing_can_be_counted_deletes_and_succeeds(attempt, monkeypatch):
    def disk_full(*_labels, **_amounts):
        raise OSError("No space left on device")

    for way in ("inc", "observe"):
        monkeypatch.setattr(WORKER_METRICS, way, disk_full)
    statuses(BATCH_SIZE + 1)

    counted_nowhere = run_attempt(attempt())

    row = JobRun.get_by_id(counted_nowhere.run.number)
    assert (row.state, row.result["deleted"]) == ("succeeded", BATCH_SIZE + 1)


# Totals, by which the breaker and previews go


def totals():
    return [(one.batch, one.run, one.records, one.bytes, one.reserved) for one in RunTotal.select()]


@every("limit", [None, 1_000], name=str)
def test_a_run_that_ends_well_is_added_up_once_with_a_limit_or_without(limit):
    RunTotal.delete().execute()
    UserStatus.delete().execute()
    statuses(200)

    row = run_as_worker(user_status_cleanup, settings_with(max_per_run_user_status_cleanup=limit))

    assert totals() == [("user_status_cleanup", row.id, 200, 0, 0)]


def test_what_a_run_had_deleted_before_it_failed_is_added_up():
    with runner_of(settings_with()) as runner, attempt_at(runner, user_status_cleanup) as attempt:
        attempt.run.outcome.deleted = 7
        raise MemoryError

    assert totals() == [("user_status_cleanup", attempt.run.number, 7, 0, 0)]


def test_what_a_child_has_deleted_is_added_to_the_newest_run_of_its_batch():
    JobRun.start_here("expired_job_artifacts", by="me")
    newest = JobRun.get()
    for destroyed in (3, 4):
        with (
            runner_of(settings_with()) as runner,
            child_attempt(runner, delete_artifact_bucket, "1", run=12) as attempt,
        ):
            attempt.work_if_allowed()
            attempt.run.outcome.destroyed, attempt.run.outcome.bytes = destroyed, 10

    assert totals() == [("expired_job_artifacts", newest.id, 7, 20, 0)]
