"""What becomes of runs: retries, lost workers, runs by hand."""

from datetime import timedelta

import pytest

from forgekeeper.ledger.holds import Hold
from forgekeeper.ledger.job_runs import JobRun
from tests.harness.performing import start_run
from tests.harness.ticks import (
    DEAD_AFTER,
    MINUTE,
    NAME,
    NOON,
    SECOND,
    fail_tick,
    ledger,
    list_sent_runs,
    reconcile,
    reconcile_at,
    row,
    rows,
    start,
    time_passes,
)

__all__ = ["ledger"]

pytestmark = pytest.mark.usefixtures("ledger")


# Retries


def test_a_retry_waits_its_time():
    reconcile_at(NOON, cron_user_status_cleanup="0 * * * *")
    fail_tick(delay=MINUTE)

    reconcile_at(NOON + MINUTE - SECOND, cron_user_status_cleanup="0 * * * *")
    assert not list_sent_runs()

    reconcile_at(NOON + MINUTE, cron_user_status_cleanup="0 * * * *")
    assert list_sent_runs() == [row().id]


def test_a_second_message_of_a_run_does_not_start_it_before_its_retry():
    reconcile_at(NOON, cron_user_status_cleanup="0 * * * *")
    fail_tick(delay=MINUTE)

    early = start()
    time_passes(MINUTE)
    in_time = start()

    assert (early, in_time.failures) == (None, 1)


def test_a_waiting_retry_gives_way_to_a_newer_tick():
    reconcile_at(NOON)
    fail_tick()

    reconcile_at(NOON + MINUTE)

    assert (row().state, row().reason) == ("failed", "superseded")
    assert rows("enqueued") == {NOON + MINUTE}


def test_a_waiting_retry_of_a_run_by_hand_gives_way_to_a_tick():
    run = JobRun.start_here(NAME, by="me")
    JobRun.fail(run, "Oops", delay=MINUTE)

    reconcile_at(NOON)

    assert JobRun.get_by_id(run.id).reason == "superseded"
    assert rows("enqueued") == {NOON}


def test_a_waiting_retry_keeps_its_place_when_a_pause_turns_the_newer_tick_away():
    reconcile_at(NOON)
    fail_tick()
    Hold.add(NAME, "pause", until=None, reason=None, by="me")

    reconcile_at(NOON + MINUTE)

    assert (row().state, row().reason) == ("enqueued", "error")
    assert rows("skipped") == {NOON + MINUTE}


def test_the_failure_after_the_last_retry_is_final():
    reconcile_at(NOON)
    for _ in range(25):
        assert JobRun.fail(start(), "Oops", delay=timedelta(0)) == "enqueued"

    assert JobRun.fail(start(), "Oops", delay=timedelta(0)) == "failed"

    assert (row().state, row().failures, row().retry_at) == ("failed", 26, None)


# Lost workers


def test_a_run_that_has_taken_three_workers_down_is_poison():
    reconcile_at(NOON, cron_user_status_cleanup="0 * * * *")
    for _ in range(3):
        start()
        time_passes(DEAD_AFTER + SECOND)
        reconcile(cron_user_status_cleanup="0 * * * *")

    assert (row().state, row().reason, row().losses) == ("failed", "poison", 3)
    assert row().finished_at is not None


ACTS = [
    lambda late: JobRun.succeed(late, {}),
    lambda late: JobRun.block(late, {}, reason="clocks", sentence="they differ"),
    lambda late: JobRun.fail(late, "Oops", delay=MINUTE),
    lambda late: JobRun.keep_alive([late]),
]


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("batch", [NAME, "prune"])
def test_an_attempt_of_a_lost_time_changes_no_run_that_has_its_number_since(act, batch):
    reconcile_at(NOON)
    late = start()
    JobRun.delete().execute()
    JobRun.insert(id=late.id, batch=batch, state="claimed", tick=NOON).execute()
    assert start_run(batch, late.id).attempt == late.attempt
    before = JobRun.select().dicts().get()

    assert not act(late)

    assert JobRun.select().dicts().get() == before


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("act", ACTS)
def test_an_attempt_that_comes_back_after_its_run_was_taken_changes_nothing(act, restarted):
    reconcile_at(NOON)
    late = start()
    reconcile_at(NOON + DEAD_AFTER + SECOND)
    if restarted:
        start()
    before = JobRun.select().dicts().get()

    assert not act(late)

    assert JobRun.select().dicts().get() == before


# Runs by hand


def test_a_run_here_takes_over_the_tick_that_waits():
    reconcile_at(NOON)

    run = JobRun.start_here(NAME, by="me")

    assert run.id == row().id
    assert row().started_by == "me"


def test_a_run_here_takes_over_the_tick_that_waits_for_its_retry():
    reconcile_at(NOON)
    fail_tick()

    run = JobRun.start_here(NAME, by="me")

    assert (run.id, run.failures) == (row().id, 1)
