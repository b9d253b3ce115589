"""What a run has done is in its row, its line and the counters, whatever becomes of the run."""

import json

import pytest

from forgekeeper.database import database
from forgekeeper.embedded.waiting import wait_until
from forgekeeper.failpoints import FailpointReached, arm
from forgekeeper.identity import identity
from forgekeeper.process.broker import broker
from forgekeeper.runs.attempt import LostRun
from forgekeeper.runs.blocked import Blocked
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.runner import Runner
from forgekeeper.settings.failpoints import parse
from metrics import logs
from metrics.counting import WORKER
from workers.user_status_cleanup import BATCH_SIZE, Outcome

NAME = "user_status_cleanup"
ADD_DUE = "insert into user_statuses (user_id, clear_status_at) select n, now() from generate_series(1, %s) as n"
pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def runner(settings):
    runner = Runner(settings)
    yield runner
    runner.stop()
    arm(parse(""))


@pytest.fixture
def attempt(runner):
    """Begin an attempt at a run; the second time at the one that waits for its retry."""
    return lambda: runner.begin(NAME, JobRun.start_here(NAME, by=identity()))


def due_statuses(count):
    database.execute_sql(ADD_DUE, (count,))


def counted():
    labels = {"batch": NAME, "record": "user_status"}
    return WORKER.registry.get_sample_value("forgekeeper_records_processed_total", labels) or 0


def fail_after_a_chunk(runner, attempt):
    arm(parse(f"{NAME}.deleted=raise*1"))
    with pytest.raises(FailpointReached) as failure:
        broker.actors["user_status_cleanup"].fn()
    return runner.close(attempt, failure.value)


def test_a_run_that_raises_keeps_what_it_did_in_its_row(runner, attempt):
    due_statuses(BATCH_SIZE + 1)
    failed = attempt()

    fail_after_a_chunk(runner, failed)

    row = JobRun.get_by_id(failed.run.id)
    assert (row.state, row.result) == ("enqueued", {"deleted": BATCH_SIZE, "batches": 1, "stopped": "drained"})


def test_a_run_that_raises_has_counted_what_it_did(runner, attempt):
    due_statuses(BATCH_SIZE + 1)
    before, failed = counted(), attempt()

    fail_after_a_chunk(runner, failed)

    assert counted() - before == BATCH_SIZE


def test_the_line_of_a_run_that_raises_says_what_it_did(runner, attempt, capsys):
    due_statuses(BATCH_SIZE + 1)
    logs.configure("json", "INFO")
    failed = attempt()

    fail_after_a_chunk(runner, failed)

    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["deleted"] for line in lines if line["message"] == "run failed"] == [BATCH_SIZE]


def test_a_run_that_was_taken_has_counted_what_it_did(runner, attempt):
    due_statuses(BATCH_SIZE + 1)
    before, taken = counted(), attempt()
    taken.sign_of_life(ours=False)

    with pytest.raises(LostRun) as lost:
        broker.actors["user_status_cleanup"].fn()
    runner.close(taken, lost.value)

    assert counted() - before == BATCH_SIZE


def test_what_is_done_is_counted_before_the_run_ends(attempt):
    running = attempt()
    before, deadline = counted(), running.deadline(running.settings.dead_after)
    running.begin(Outcome())

    running.outcome.deleted += 7
    deadline.passed()

    assert counted() - before == 7


def test_the_ledger_says_of_a_run_under_way_what_it_has_done_so_far(settings):
    runner = Runner(settings.model_copy(update={"dead_after": settings.dead_after / 15}))
    running = runner.begin(NAME, JobRun.start_here(NAME, by=identity()))
    running.begin(Outcome(deleted=5, batches=1))

    said = wait_until(lambda: JobRun.get_by_id(running.run.id).result == running.result(), limit=60)
    runner.stop()

    assert said


def test_what_an_earlier_attempt_did_stays_beside_what_the_last_one_did(runner, attempt):
    due_statuses(BATCH_SIZE + 1)
    fail_after_a_chunk(runner, attempt())
    again = attempt()

    broker.actors["user_status_cleanup"].fn()
    runner.close(again, None)

    earlier = {"deleted": BATCH_SIZE, "batches": 1, "stopped": "drained"}
    expected = {"deleted": 1, "batches": 1, "stopped": "drained", "earlier": [earlier]}
    assert JobRun.get_by_id(again.run.id).result == expected


def test_a_blocked_run_is_closed_with_its_reason_and_a_sentence(runner, attempt):
    blocked = attempt()
    blocked.begin(Outcome())
    blocked.blocked = Blocked("no_store", "there is no store; configure one")

    runner.close(blocked, None)

    expected = {"deleted": 0, "batches": 0, "stopped": "drained", "skipped": "no_store"}
    assert JobRun.get_by_id(blocked.run.id).result == expected | {"blocked": "there is no store; configure one"}
