"""When a scheduler's turn may end with one look: whatever the ledger has in it, a whole turn would do nothing then."""

from datetime import timedelta

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler
from forgekeeper import database as db
from forgekeeper.connections import client
from forgekeeper.runs.batch import Batch
from forgekeeper.runs.holds import Hold
from forgekeeper.runs.ledger import CLOCK_TOLERANCE, OPEN, JobRun
from forgekeeper.runs.reconcile import is_at_rest
from scheduler import WHOLE_EVERY, Loop
from tests.harness.settings import settings_with
from tests.harness.thorough import examples
from tests.test_reconcile import (
    BATCH,
    DAWN,
    HOUR,
    MINUTE,
    NAME,
    NOON,
    SECOND,
    at,
    clock_is,
    executed,
    ledger,
    reconcile,
)

__all__ = ["ledger"]

CLOSED = ("succeeded", "failed", "skipped", "coalesced", "missed", "blocked")
AWAY = (-HOUR, -MINUTE, -SECOND, timedelta(0), SECOND, CLOCK_TOLERANCE, 3 * SECOND, HOUR)
ROWS = "select *, xmin::text from job_runs order by id"
BATCHES = "select *, xmin::text from batches order by name"
HOLDS = "select *, xmin::text from holds order by id"

instants = st.sampled_from([NOON + away for away in AWAY])
perhaps = st.none() | instants
ticks = st.sampled_from([NOON + number * MINUTE for number in (-60, -2, -1, 0, 1, 60)])
closed = st.fixed_dictionaries({"state": st.sampled_from(CLOSED), "finished_at": instants, "started_at": perhaps})
opened = st.fixed_dictionaries(
    {"state": st.sampled_from(OPEN), "claimed_at": instants, "alive_at": perhaps, "retry_at": perhaps}
)
runs = st.tuples(
    st.dictionaries(ticks, closed, max_size=3), st.lists(closed, max_size=1), st.none() | st.tuples(ticks, opened)
)
batches = st.fixed_dictionaries({"registered_at": instants}, optional={"blocked_since": instants})
holds = st.lists(
    st.fixed_dictionaries({"kind": st.sampled_from(["pause", "stop", "breaker"]), "since": instants}), max_size=2
)
configured = st.fixed_dictionaries(
    {
        "cron_user_status_cleanup": st.sampled_from(["* * * * *", "*/10 * * * *", "0 * * * *", "off"]),
        "catch_up_user_status_cleanup": st.sampled_from(["once", "skip"]),
    }
)


def rests(**given):
    return is_at_rest(NAME, settings_with(**given))


def fill(ticked, by_hand, opened, batch, holds):
    db.database.execute_sql("delete from job_runs; delete from batches; delete from holds")
    client.flushdb()
    for tick, run in ticked.items():
        JobRun.insert(batch=NAME, tick=tick, **run).execute()
    for run in by_hand:
        JobRun.insert(batch=NAME, **run).execute()
    if opened is not None and opened[0] not in ticked:
        JobRun.insert(batch=NAME, tick=opened[0], **opened[1]).execute()
    if batch is not None:
        Batch.insert(name=NAME, **batch).execute()
    for hold in holds:
        Hold.insert(batch=NAME, by="me", **hold).execute()


def everything():
    tables = [db.database.execute_sql(select).fetchall() for select in (ROWS, BATCHES, HOLDS)]
    return tables, {key: client.dump(key) for key in client.scan_iter()}


@given(runs=runs, batch=st.none() | batches, holds=holds, now=instants, configured=configured)
@settings(max_examples=examples(1_000))
def test_a_whole_turn_does_and_tells_nothing_where_a_batch_is_at_rest(runs, batch, holds, now, configured):
    fill(*runs, batch, holds)
    clock_is(now)
    if not rests(**configured):
        return
    before = everything()

    with structlog.testing.capture_logs() as told:
        reconcile(**configured)

    assert everything() == before
    assert not told


def test_a_batch_is_at_rest_when_all_that_was_due_has_run():
    at(NOON)
    executed()

    assert rests()


def test_a_batch_of_which_nothing_was_due_yet_is_at_rest():
    assert rests()


@pytest.mark.parametrize("state", OPEN)
def test_a_batch_with_an_open_run_is_not_at_rest(state):
    JobRun.insert(batch=NAME, tick=DAWN, state=state, claimed_at=DAWN, alive_at=DAWN).execute()

    assert not rests()


def test_a_batch_is_not_at_rest_when_a_tick_is_due():
    clock_is(NOON)

    assert not rests()


def test_a_batch_without_a_timetable_is_at_rest_though_it_has_not_run_for_long():
    clock_is(NOON + HOUR)

    assert rests(cron_user_status_cleanup="off")


def test_a_batch_that_nobody_knows_is_not_at_rest():
    Batch.delete().execute()

    assert not rests()


def test_a_batch_that_was_registered_ahead_is_not_at_rest():
    Batch.update(registered_at=DAWN + SECOND).execute()

    assert not rests()


def test_a_batch_whose_hold_begins_ahead_is_not_at_rest():
    Hold.insert(batch=NAME, kind="stop", by="me", since=DAWN + SECOND).execute()

    assert not rests()


@pytest.mark.parametrize("ahead", [{"tick": DAWN + HOUR}, {"finished_at": DAWN + HOUR}])
def test_a_batch_of_which_a_run_lies_ahead_is_not_at_rest(ahead):
    JobRun.insert(batch=NAME, state="succeeded", **{"tick": DAWN, "finished_at": DAWN} | ahead).execute()

    assert not rests()


@pytest.fixture
def turns(ledger, monkeypatch):
    """A loop that is not started, the whole turns that it has taken, and its clock."""
    taken, clock, whole = [], [0.0], scheduler.reconcile

    def noted(*arguments, **facts):
        taken.append(facts["due_hint"])
        whole(*arguments, **facts)

    monkeypatch.setattr(scheduler, "monotonic", lambda: clock[0])
    monkeypatch.setattr(scheduler, "reconcile", noted)
    return Loop(BATCH, ledger, broken=None, asked=None), taken, clock


def test_a_loop_looks_whether_its_batch_is_at_rest_between_two_whole_turns(turns):
    loop, taken, _clock = turns

    for _ in range(3):
        loop.turn()

    assert taken == [None]


def test_a_loop_takes_a_whole_turn_each_minute(turns):
    loop, taken, clock = turns
    loop.turn()

    clock[0] += WHOLE_EVERY
    loop.turn()

    assert taken == [None, None]


def test_a_loop_that_is_woken_takes_a_whole_turn_for_what_is_due_by_this_machine(turns, monkeypatch):
    loop, taken, _clock = turns
    loop.turn()
    monkeypatch.setattr(scheduler, "current_millis", lambda: NOON.timestamp() * 1000)

    loop.wake()
    loop.turn()

    assert taken == [None, NOON]
