"""The look at all batches overlooks none of which reconcile has something to do, and names none for nothing."""

from datetime import timedelta
from functools import reduce

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from forgekeeper.api.batches import BATCHES
from forgekeeper.ledger import batches_to_reconcile
from forgekeeper.ledger.batches_to_reconcile import REASONS_TO_RECONCILE, find_batches_to_reconcile
from forgekeeper.ledger.job_runs import CLOCK_TOLERANCE, OPEN_STATES
from forgekeeper.ledger.reconcile import LONGEST_RETRY, RESEND_AFTER
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database
from tests.harness.settings import settings_with
from tests.harness.thorough import examples
from tests.harness.ticks import (
    DAWN,
    DEAD_AFTER,
    HOUR,
    MICROSECOND,
    MINUTE,
    NAME,
    NOON,
    SECOND,
    clock_is,
    ledger,
    list_sent_runs,
    reconcile,
)

__all__ = ["ledger"]

pytestmark = pytest.mark.usefixtures("ledger")

CLOSED_STATES = ("succeeded", "failed", "skipped", "coalesced", "missed", "blocked")
TIMES_OF_A_RUN = ("tick", "claimed_at", "enqueued_at", "started_at", "alive_at", "finished_at", "retry_at")
SHOWN_HOLD = ("paused_until", "stopped_since", "held_since", "held_reason")
STATE = """
    select 1, batch, id, job_runs::text from job_runs union all select 2, batch, id, holds::text from holds
    union all select 3, name, 0, batches::text from batches order by 1, 2, 3
"""
LIMITS = (timedelta(0), CLOCK_TOLERANCE, DEAD_AFTER, RESEND_AFTER, MINUTE, LONGEST_RETRY, 30 * HOUR)
SPANS = [
    sign * limit + beside for limit in LIMITS for sign in (1, -1) for beside in (-MICROSECOND, 0 * SECOND, MICROSECOND)
]
YEARS_LATER = NOON.replace(year=2126)

REGISTERED = {"schedule": "off", "registered_at": DAWN, "runs": [], "holds": [], "shown": None}
RUN = dict.fromkeys(TIMES_OF_A_RUN) | {"failures": 0, "losses": 0}


@st.composite
def changed(draw, quiet, changes):
    """Draw *quiet* with a few changes: one reason must not always hide behind another."""
    names = draw(st.lists(st.sampled_from(sorted(changes)), unique=True, max_size=3))
    return quiet | {name: draw(changes[name]) for name in names}


instants = st.sampled_from(SPANS).map(NOON.__add__)
maybe = st.none() | instants
facts_of_a_run = dict.fromkeys(TIMES_OF_A_RUN, maybe) | {"failures": st.integers(0, 1), "losses": st.integers(0, 2)}


def runs_in(states, most):
    one = st.sampled_from(states).flatmap(lambda state: changed(RUN | {"state": state}, facts_of_a_run))
    return st.lists(one, max_size=most)


runs = st.tuples(runs_in(OPEN_STATES, 1), runs_in(CLOSED_STATES, 2)).map(lambda both: [*both[0], *both[1]])
# The function that shows holds asks the real clock whether a stop has ended: here both clocks agree.
ends = {"stop": st.sampled_from([None, *(end for end in map(NOON.__add__, SPANS) if end <= NOON), YEARS_LATER])}
holds = st.sampled_from(["pause", "stop", "breaker", "new"]).flatmap(
    lambda kind: st.fixed_dictionaries({
        "kind": st.just(kind), "by": st.just("me"), "since": instants, "until": ends.get(kind, maybe)
    })
)  # fmt: skip
shown = st.fixed_dictionaries({}, optional=dict.fromkeys(SHOWN_HOLD[:3], instants) | {"held_reason": st.just("new")})
cases = changed(REGISTERED, {
    "schedule": st.sampled_from(["* * * * * *", "* * * * *", "*/10 * * * *"]),
    "registered_at": maybe, "runs": runs, "holds": st.lists(holds, max_size=2), "shown": shown,
})  # fmt: skip
ONE_CASE = {
    "batch ahead": REGISTERED | {"registered_at": NOON + MICROSECOND},
    "hold ahead": REGISTERED | {"holds": [{"kind": "stop", "by": "me", "since": NOON + MICROSECOND, "until": None}]},
    "hold not shown": REGISTERED | {"shown": {"stopped_since": DAWN}},
    "closed run ahead": REGISTERED | {"runs": [RUN | {"state": "failed", "finished_at": NOON + HOUR}]},
    "open run ahead": REGISTERED
    | {"runs": [RUN | {"state": "started", "started_at": NOON + HOUR, "alive_at": NOON + HOUR}]},
    "lost run": REGISTERED | {"runs": [RUN | {"state": "started", "started_at": DAWN, "alive_at": DAWN}]},
    "unsent run": REGISTERED | {"runs": [RUN | {"state": "claimed", "claimed_at": DAWN}]},
}
DUE = REGISTERED | {"schedule": "* * * * *"}


def each_example(*given):
    return lambda test: reduce(lambda decorated, case: example(case)(decorated), given, test)


def insert(table, values):
    columns, places = ", ".join(f'"{name}"' for name in values), ", ".join(["%s"] * len(values))
    database.execute_sql(f"insert into {table} ({columns}) values ({places})", list(values.values()))


def put(case):
    """Store a state of the ledger, whatever the triggers would make of it; return the settings."""
    client.flushdb()
    database.execute_sql("delete from job_runs; delete from batches; delete from holds")
    clock_is(NOON)
    ticks = set()
    with database.atomic():
        database.execute_sql("set local session_replication_role = replica" if case["shown"] is not None else "select")
        if case["registered_at"] is not None:
            insert("batches", {"name": NAME, "registered_at": case["registered_at"]} | (case["shown"] or {}))
        for hold in case["holds"]:
            insert("holds", {"batch": NAME} | hold)
        for run in case["runs"]:
            # A tick has one row.
            insert("job_runs", {"batch": NAME} | run | {"tick": None if run["tick"] in ticks else run["tick"]})
            ticks.add(run["tick"])
    return {"cron_user_status_cleanup": case["schedule"]}


def look(configured):
    return NAME in find_batches_to_reconcile([NAME], settings_with(**configured))


def reconcile_acts(configured):
    """Reconcile; tell whether that has changed or sent anything."""
    before = database.execute_sql(STATE).fetchall()
    reconcile(**configured)
    return database.execute_sql(STATE).fetchall() != before or list_sent_runs() != []


@settings(max_examples=examples(1_000), suppress_health_check=list(HealthCheck), deadline=None, print_blob=True)
@given(cases)
@each_example(*ONE_CASE.values(), DUE)
def test_a_batch_is_looked_at_whenever_any_step_has_something_to_do_and_not_for_ever(case):
    configured = put(case)

    named = look(configured)
    acts = reconcile_acts(configured)

    assert named or not acts
    # A turn may leave work to the next: it corrects a run's times before a new tick closes that run.
    assert not (look(configured) and reconcile_acts(configured) and look(configured))


@pytest.mark.parametrize("reason", REASONS_TO_RECONCILE)
def test_without_any_one_of_its_reasons_the_look_would_overlook_a_batch(reason, monkeypatch):
    configured = put(ONE_CASE[reason])
    whole = look(configured)

    monkeypatch.delitem(batches_to_reconcile.REASONS_TO_RECONCILE, reason)

    assert (whole, look(configured)) == (True, False)
    assert reconcile_acts(configured)


def test_a_due_tick_is_seen_by_the_database_s_clock():
    put(REGISTERED)
    every_second = {"cron_user_status_cleanup": "* * * * * *"}

    due = look(every_second)
    reconcile(**every_second)
    early = (look(every_second), clock_is(NOON + SECOND - MICROSECOND), look(every_second))
    clock_is(NOON + SECOND)

    assert (due, early, look(every_second)) == (True, (False, None, False), True)


def test_one_statement_looks_at_all_batches_and_names_those_that_need_a_turn(monkeypatch):
    put(ONE_CASE["lost run"])
    everything_off = {f"cron_{name}": "off" for name in BATCHES}
    statements, ask = [], database.obj.execute_sql
    monkeypatch.setattr(database.obj, "execute_sql", lambda *asked: statements.append(asked) or ask(*asked))

    found = find_batches_to_reconcile(BATCHES, settings_with(**everything_off))

    assert (found, len(statements)) == ({NAME}, 1)
