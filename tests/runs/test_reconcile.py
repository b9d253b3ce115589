"""What becomes of a batch's ticks: which are claimed, skipped, caught up, and sent once."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import redis

from forgekeeper import database as db
from forgekeeper.connections import client
from forgekeeper.delivery.broker import broker
from forgekeeper.runs import reconcile as runs
from forgekeeper.runs.batch import Batch
from forgekeeper.runs.holds import BY_PEOPLE, Hold
from forgekeeper.runs.ledger import JobRun
from tests.harness.ledger import start_run
from tests.harness.ticks import (
    DAWN,
    MINUTE,
    NAME,
    NOON,
    SECOND,
    acknowledge,
    at,
    clock_is,
    fetch,
    ledger,
    reconcile,
    row,
    rows,
    sent,
    start,
)

__all__ = ["ledger"]

pytestmark = pytest.mark.usefixtures("ledger")


# Ticks


def test_what_was_due_before_the_batch_was_known_is_not_run():
    at(DAWN + 29 * SECOND)

    assert not JobRun.select().exists()


def test_a_batch_that_nobody_has_registered_is_known_from_its_first_reconcile_on():
    Batch.delete().execute()

    reconcile()

    assert Batch.select().where(Batch.name == NAME).exists()
    assert not JobRun.select().exists()


def test_the_first_tick_is_claimed_and_sent():
    at(NOON)

    assert row().state == "enqueued"
    assert sent() == [row().id]


def test_a_tick_is_claimed_and_sent_once_by_schedulers_that_fire_together():
    clock_is(NOON)
    together = threading.Barrier(6)

    def fire(by):
        with db.database.connection_context():
            together.wait()
            reconcile(by=by)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(fire, "ABCDEF"))

    assert JobRun.select().count() == 1
    assert sent() == [row().id]


def test_a_reconcile_that_finds_nothing_to_do_changes_nothing():
    at(NOON)
    before = list(JobRun.select().dicts())

    at(NOON + SECOND, by="B")

    assert list(JobRun.select().dicts()) == before
    assert len(sent()) == 1


def test_a_scheduler_whose_clock_is_two_seconds_fast_is_believed():
    clock_is(NOON - 2 * SECOND)

    reconcile(due_hint=NOON)

    assert rows("enqueued") == {NOON}


def test_a_scheduler_whose_clock_is_three_seconds_fast_is_not_believed():
    clock_is(NOON - 3 * SECOND)

    reconcile(due_hint=NOON)

    assert not JobRun.select().exists()


# Pauses


def test_a_tick_that_comes_during_a_pause_is_skipped():
    Hold.add(NAME, "pause", until=None, reason=None, by="me")

    at(NOON)

    assert (row().state, row().reason) == ("skipped", "paused")
    assert not sent()


def test_a_run_that_was_sent_before_the_pause_runs_after_it():
    at(NOON)
    Hold.add(NAME, "pause", until=None, reason=None, by="me")
    acknowledge(fetch())
    reconcile()
    assert not sent()
    Hold.lift(NAME, BY_PEOPLE)

    at(NOON + 30 * SECOND)

    assert sent() == [row().id]
    assert start() is not None


# Outages


def test_after_an_outage_the_newest_tick_is_caught_up_and_the_older_ones_are_coalesced():
    at(NOON + timedelta(minutes=3, seconds=1), cron_user_status_cleanup="0-2 * * * *")

    assert (row(NOON + 2 * MINUTE).state, row(NOON + 2 * MINUTE).reason) == ("enqueued", "catch_up")
    assert rows("coalesced") == {NOON, NOON + MINUTE}


def test_ticks_outside_the_window_are_missed():
    at(NOON + 10 * MINUTE, catch_up_window="120")

    assert rows("enqueued") == {NOON + 10 * MINUTE}
    assert rows("coalesced") == {NOON + 9 * MINUTE}
    assert rows("missed") == {NOON + minutes * MINUTE for minutes in range(9)}


def test_a_late_tick_is_missed_where_catching_up_is_switched_off():
    at(NOON + 2 * MINUTE, cron_user_status_cleanup="0 * * * *", catch_up_user_status_cleanup="skip")

    assert rows("missed") == {NOON}
    assert not sent()


# Sending


def test_what_a_scheduler_claimed_before_it_died_is_sent_by_the_next(monkeypatch):
    clock_is(NOON)
    with dying_before(monkeypatch, runs, "send"):
        reconcile()
    assert row().state == "claimed"

    at(NOON + SECOND, by="B")

    assert row().state == "enqueued"
    assert sent() == [row().id]


def test_a_run_claimed_by_a_clock_that_was_set_back_since_is_sent_by_anyone():
    clock_is(NOON)
    JobRun.claim(NAME, NOON, by="A", reason=None)

    at(NOON - SECOND, by="B")

    assert sent() == [row().id]


def test_a_run_that_a_scheduler_has_marked_and_not_sent_when_it_died_is_sent_by_another_within_half_a_minute(
    monkeypatch,
):
    clock_is(NOON)
    with dying_before(monkeypatch, broker, "enqueue"):
        reconcile()
    assert (row().state, sent()) == ("enqueued", [])

    at(NOON + 29 * SECOND, by="B")
    assert sent() == []
    at(NOON + 30 * SECOND, by="B")

    assert sent() == [row().id]


def test_a_run_whose_message_was_lost_is_sent_again_within_half_a_minute():
    at(NOON)
    client.flushdb()

    at(NOON + 30 * SECOND)

    assert sent() == [row().id]


def test_a_run_that_cannot_be_sent_is_sent_by_the_next_reconcile(monkeypatch):
    clock_is(NOON)
    with monkeypatch.context() as patch, pytest.raises(redis.ConnectionError):  # noqa: PT012, one act
        patch.setattr(broker, "enqueue", unreachable)
        reconcile()

    at(NOON + SECOND)

    assert sent() == [row().id]


def unreachable(_message):
    raise redis.ConnectionError


@contextmanager
def dying_before(monkeypatch, where, name):
    """Let the process die before its next step, in the one way a test can survive."""

    class Death(BaseException):
        pass

    def die(*_arguments, **_options):
        raise Death

    with monkeypatch.context() as patch, pytest.raises(Death):  # noqa: PT012, the caller's one statement is the act
        patch.setattr(where, name, die)
        yield


def test_a_message_of_another_batch_starts_no_run():
    at(NOON)

    assert start_run("stale_imports", row().id, by="worker") is None
    assert row().state == "enqueued"
