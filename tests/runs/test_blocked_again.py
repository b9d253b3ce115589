"""A blocked run is tried again soon, not at its next tick hours later; by a clock of the database that the test sets."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import structlog

from forgekeeper import database as db
from forgekeeper.batches import BATCHES
from forgekeeper.runs.batch import Batch
from forgekeeper.runs.blocked import Blocked
from forgekeeper.runs.holds import BRAKES, BY_PEOPLE, Hold
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.reconcile import BLOCKED_AGAIN, TICK_AHEAD
from tests.harness.ledger import start_run
from tests.harness.performing import runner_of
from tests.harness.settings import settings_with
from tests.harness.ticks import (
    BATCH,
    HOUR,
    NAME,
    NOON,
    SECOND,
    at,
    broker,
    executed,
    fetch,
    ledger,
    reconcile,
    row,
    rows,
    sent,
    time_passes,
)

__all__ = ["ledger"]

pytestmark = pytest.mark.usefixtures("ledger")

AFTER = 15 * SECOND
"""What the settings say by default."""
HOURLY = {"cron_user_status_cleanup": "0 * * * *"}
APART = Blocked("clocks", "the clocks are apart")


def blocked(tick=NOON, **result):
    """Let the tick's next attempt be blocked, from its message to the acknowledgement."""
    message = fetch()
    run = start_run(NAME, row(tick).id, by="worker")
    assert JobRun.block(run, {"deleted": 0} | result, reason="clocks", sentence="the clocks are apart")
    broker.do_ack(BATCH.queue, message.message_id)


@pytest.fixture
def block():
    """The first tick of an hourly batch was blocked."""
    at(NOON, **HOURLY)
    blocked()


def later(duration=AFTER, **settings):
    time_passes(duration)
    reconcile(**HOURLY | settings)


def test_a_blocked_run_is_sent_again_though_its_next_tick_is_an_hour_away(block):
    later()

    assert (row().state, row().reason, sent()) == ("enqueued", "clocks", [row().id])


def test_a_blocked_run_waits_for_half_a_minute_at_most(block):
    later(BLOCKED_AGAIN, retry_after=3_600)

    assert row().state == "enqueued"


def test_what_is_tried_again_and_may_work_ends_the_block_with_its_own_row(block):
    later()
    executed()

    assert (row().state, row().attempt, JobRun.select().count()) == ("succeeded", 2, 1)
    assert Batch.blocked(NAME) is None


def test_a_block_that_lasts_counts_from_its_first_run_and_fills_one_row(block):
    since = Batch.get_by_id(NAME).blocked_since

    for _ in range(5):
        later()
        blocked()

    assert Batch.get_by_id(NAME).blocked_since == since
    assert (JobRun.select().count(), row().state, row().attempt, row().failures) == (1, "blocked", 6, 0)
    assert row().result == {"deleted": 0}


def test_what_a_blocked_attempt_had_done_is_kept_when_it_is_tried_again(block):
    later()
    blocked(deleted=7)
    for _ in range(2):
        later()
        blocked()

    assert row().result == {"deleted": 0, "earlier": [{"deleted": 7}]}


def test_a_run_that_is_blocked_again_gives_way_to_a_newer_tick_and_stays_blocked(block):
    later()

    at(NOON + HOUR, **HOURLY)

    assert (row().state, row().reason) == ("blocked", "clocks")
    assert rows("enqueued") == {NOON + HOUR}


def test_a_tick_that_is_near_looks_by_itself(block):
    at(NOON + HOUR - TICK_AHEAD, **HOURLY)

    assert row().state == "blocked"


def test_the_newest_tick_is_tried_again_and_none_before_it(block):
    at(NOON + HOUR, **HOURLY)
    blocked(NOON + HOUR)

    later()

    assert (row().state, rows("enqueued")) == ("blocked", {NOON + HOUR})


@pytest.mark.parametrize("kind", [*BY_PEOPLE, *BRAKES])
def test_a_batch_that_is_held_back_is_not_tried_again(block, kind):
    Hold.add(NAME, kind, reason="rate", by="me")

    later()

    assert (row().state, sent()) == ("blocked", [])


def test_a_batch_that_another_run_has_unblocked_is_not_tried_again(block):
    run = JobRun.start_here(NAME, by="me")
    assert JobRun.succeed(run, {})

    later()

    assert (row().state, sent()) == ("blocked", [])


def test_a_run_by_hand_that_was_blocked_is_over():
    assert JobRun.block(JobRun.start_here(NAME, by="me"), {}, reason="clocks", sentence="apart")

    later(**HOURLY)

    assert [run.state for run in JobRun.select()] == ["blocked"]


def test_a_batch_that_was_taken_off_the_timetable_is_not_tried_again(block):
    later(cron_user_status_cleanup="off")

    assert row().state == "blocked"


def test_a_run_that_was_cancelled_is_not_tried_again(block):
    JobRun.cancel(row().id, reason="enough", by="me")

    later()

    assert row().state == "blocked"


def test_schedulers_that_look_together_try_a_blocked_run_again_once(block):
    time_passes(AFTER)

    def look(by):
        with db.database.connection_context():
            reconcile(by=by, **HOURLY)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(look, "ABCDEF"))

    assert sent() == [row().id]


# What is said of it


@pytest.fixture
def said():
    """What attempts at the first tick say, by its level, from the block on."""
    lines = []

    def attempt(blocked=None):
        with runner_of(settings_with()) as runner, structlog.testing.capture_logs() as captured:
            message = fetch()
            with runner.attempt(BATCHES[NAME], start_run(NAME, row().id, by="worker")) as attempt:
                attempt.blocked = blocked
            broker.do_ack(BATCH.queue, message.message_id)
        lines.extend((line["log_level"], line["event"]) for line in captured)

    at(NOON, **HOURLY)
    attempt(APART)
    assert ("error", "run blocked") in lines
    lines.clear()
    with structlog.testing.capture_logs() as captured:
        later()
    lines.extend((line["log_level"], line["event"]) for line in captured)
    return lines, attempt


def test_that_a_block_lasts_is_said_to_those_only_who_debug(said):
    lines, attempt = said

    attempt(APART)

    assert lines == [("debug", "run sent"), ("debug", "run started"), ("debug", "run blocked")]
