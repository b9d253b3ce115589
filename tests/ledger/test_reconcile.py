"""What becomes of a batch's ticks: claimed, skipped, caught up and sent once, and if the database's clock was ahead."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import redis

from forgekeeper.ledger.holds import KINDS_BY_PEOPLE, Batch, Hold
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.reconcile import count_ticks_ahead
from forgekeeper.platform import database as db
from forgekeeper.platform.connections import client
from tests.harness.performing import start_run
from tests.harness.tables import sessions_waiting_for_a_lock, wait_for_locks
from tests.harness.ticks import (
    DAWN,
    DEAD_AFTER,
    HOUR,
    MICROSECOND,
    MINUTE,
    NAME,
    NOON,
    SECOND,
    acknowledge,
    clock_is,
    execute_tick,
    fetch,
    ledger,
    list_sent_runs,
    reconcile,
    reconcile_at,
    row,
    rows,
    start,
    time_passes,
)
from tests.harness.waiting import wait_until

__all__ = ["ledger"]

LIMIT_SECONDS = 30.0

pytestmark = pytest.mark.usefixtures("ledger")


# Ticks


def test_a_batch_that_nobody_has_registered_is_known_from_its_first_reconcile_on():
    Batch.delete().execute()

    reconcile()

    assert Batch.select().where(Batch.name == NAME).exists()
    assert not JobRun.select().exists()


def test_a_tick_is_claimed_and_sent_once_by_schedulers_that_fire_together(other):
    clock_is(NOON)
    # A claim that is not committed lets all of them come to the same point, and is taken back then.
    other.execute("insert into job_runs (batch, tick, state) values (%s, %s, 'claimed')", (NAME, NOON))

    def fire(by):
        with db.database.connection_context():
            wait_for_locks()
            reconcile(by=by)

    with ThreadPoolExecutor(6) as pool:
        firing = [pool.submit(fire, by) for by in "ABCDEF"]
        waited = wait_until(lambda: sessions_waiting_for_a_lock() == 6, LIMIT_SECONDS)
        other.connection.rollback()
        for one in firing:
            one.result()

    assert waited
    assert JobRun.select().count() == 1
    assert list_sent_runs() == [row().id]


@pytest.mark.parametrize(("early", "claimed"), [(SECOND, True), (2 * SECOND, True), (3 * SECOND, False)])
def test_the_ledger_itself_turns_a_claim_away_that_comes_too_early(early, claimed):
    clock_is(NOON - early)

    claimed_id = JobRun.claim(NAME, NOON, by="A", reason=None)

    assert (claimed_id is not None) is claimed


def test_a_tick_that_comes_while_the_batch_runs_is_skipped_as_an_overlap():
    reconcile_at(NOON)
    run = start()
    time_passes(MINUTE)
    JobRun.keep_alive([run])

    reconcile()

    assert (row(NOON + MINUTE).state, row(NOON + MINUTE).reason) == ("skipped", "overlap")
    assert row().state == "started"


# Pauses


def test_a_tick_that_comes_during_a_pause_is_skipped():
    Hold.add(NAME, "pause", until=None, reason=None, by="me")

    reconcile_at(NOON)

    assert (row().state, row().reason) == ("skipped", "paused")
    assert not list_sent_runs()


def test_a_run_that_was_sent_before_the_pause_runs_after_it():
    reconcile_at(NOON)
    Hold.add(NAME, "pause", until=None, reason=None, by="me")
    acknowledge(fetch())
    reconcile()
    assert not list_sent_runs()
    Hold.lift(NAME, KINDS_BY_PEOPLE)

    reconcile_at(NOON + 30 * SECOND)

    assert list_sent_runs() == [row().id]
    assert start() is not None


# Outages


def test_after_an_outage_the_newest_tick_is_caught_up_and_the_older_ones_are_coalesced():
    reconcile_at(NOON + timedelta(minutes=3, seconds=1), cron_user_status_cleanup="0-2 * * * *")

    assert (row(NOON + 2 * MINUTE).state, row(NOON + 2 * MINUTE).reason) == ("enqueued", "catch_up")
    assert rows("coalesced") == {NOON, NOON + MINUTE}


# Sending


def test_a_run_whose_message_was_lost_is_sent_again_within_half_a_minute():
    reconcile_at(NOON)
    client.flushdb()

    reconcile_at(NOON + 30 * SECOND)

    assert list_sent_runs() == [row().id]


def test_a_run_that_redis_refuses_is_sent_in_the_next_turn():
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(redis.RedisError):
            reconcile_at(NOON)
    finally:
        client.config_set("maxmemory", 0)

    reconcile_at(NOON + SECOND)

    assert list_sent_runs() == [row().id]


# The database's clock was a day ahead, and is set right

TOMORROW = NOON + 24 * HOUR


def test_a_clock_that_was_ahead_holds_no_tick_back_once_it_is_right():
    reconcile_at(TOMORROW)
    execute_tick(TOMORROW)

    reconcile_at(NOON)

    assert row(NOON).state == "enqueued"
    assert list_sent_runs() == [row(NOON).id]


def test_a_row_whose_tick_was_set_aside_remembers_it_and_ended_before_now():
    reconcile_at(TOMORROW)
    early = row(TOMORROW).id
    execute_tick(TOMORROW)

    reconcile_at(NOON)

    aside = JobRun.get_by_id(early)
    assert (aside.state, aside.tick, aside.result) == ("succeeded", None, {"set_aside": TOMORROW.isoformat()})
    assert aside.finished_at == NOON
    assert JobRun.read_health(NAME).last_success == NOON


@pytest.mark.parametrize(("early", "ticks"), [(2 * SECOND, 0), (2 * SECOND + MICROSECOND, 1)])
def test_a_clock_set_back_by_no_more_than_the_tolerance_sets_nothing_aside(early, ticks):
    reconcile_at(NOON)
    execute_tick(NOON)

    reconcile_at(NOON - early)

    assert count_ticks_ahead(NAME) == ticks


def test_the_run_of_a_worker_that_died_while_the_clock_was_ahead_is_taken_as_soon_as_any():
    reconcile_at(TOMORROW)
    start(TOMORROW)

    reconcile_at(NOON)
    reconcile_at(NOON + DEAD_AFTER + SECOND)

    assert (row(TOMORROW).state, row(TOMORROW).reason) == ("enqueued", "worker_lost")


def test_a_worker_that_lives_keeps_its_run_when_the_clock_is_set_right():
    reconcile_at(TOMORROW)
    run = start(TOMORROW)

    reconcile_at(NOON)
    time_passes(DEAD_AFTER)
    alive = JobRun.keep_alive([run])
    reconcile()

    assert alive == {run.id}
    assert JobRun.succeed(run, {})


def test_a_retry_of_a_run_by_hand_does_not_wait_for_a_time_that_only_a_wrong_clock_knew():
    clock_is(TOMORROW)
    run = start_run(NAME, JobRun.claim_manual(NAME, by="A"), by="worker")
    JobRun.fail(run, "too early", delay=MINUTE)

    reconcile_at(DAWN)
    reconcile_at(DAWN + SECOND)

    assert JobRun.get_by_id(run.id).retry_at == DAWN
    assert list_sent_runs() == [run.id]


def test_a_batch_registered_and_paused_while_the_clock_was_ahead_is_not_new_for_a_day():
    Batch.update(registered_at=TOMORROW).execute()
    Hold.insert(batch=NAME, kind="pause", by="me", since=TOMORROW, until=DAWN).execute()

    reconcile_at(NOON)
    reconcile_at(NOON + MINUTE)

    assert (Batch.get().registered_at, Hold.get().since) == (NOON, NOON)
    assert rows("enqueued") == {NOON + MINUTE}
