"""What becomes of a batch's ticks: which are claimed, skipped, caught up, and sent once."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from forgekeeper import database as db
from forgekeeper.connections import client
from forgekeeper.runs.holds import BY_PEOPLE, Batch, Hold
from forgekeeper.runs.ledger import JobRun
from tests.harness.ticks import (
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


def test_a_batch_that_nobody_has_registered_is_known_from_its_first_reconcile_on():
    Batch.delete().execute()

    reconcile()

    assert Batch.select().where(Batch.name == NAME).exists()
    assert not JobRun.select().exists()


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


# Sending


def test_a_run_whose_message_was_lost_is_sent_again_within_half_a_minute():
    at(NOON)
    client.flushdb()

    at(NOON + 30 * SECOND)

    assert sent() == [row().id]
