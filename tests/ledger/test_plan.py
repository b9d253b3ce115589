"""What is decided about ticks, whatever the clock says, the ledger knows and the timetable wants: no server is asked."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from forgekeeper.ledger.job_runs import CLOCK_TOLERANCE
from forgekeeper.ledger.reconcile import MAX_OLDER_TICKS, MISFIRE_GRACE, TickDecision, decide_ticks
from forgekeeper.platform.settings.cron import Cron
from tests.harness.thorough import whole_only

MICROSECOND = timedelta(microseconds=1)
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
SCHEDULES = [Cron(text) for text in ("* * * * * *", "* * * * *", "*/7 * * * *", "0-2 * * * *", "30 4 * * *")]
EVERY_MINUTE, ON_THE_HOUR = Cron("* * * * *"), Cron("0 * * * *")


def spans(longest):
    """Durations that lie at the limits, beside them and anywhere."""
    edges = st.sampled_from([timedelta(0), MICROSECOND, SECOND, MISFIRE_GRACE, MISFIRE_GRACE + MICROSECOND, HOUR])
    return edges | st.timedeltas(timedelta(0), longest)


rules = st.fixed_dictionaries({"catch_up": st.sampled_from(["once", "skip"]), "window": spans(3 * HOUR)})


@st.composite
def instants(draw, schedule):
    """Draw a moment on a tick, just beside one, or anywhere."""
    anywhere = draw(st.timedeltas(timedelta(0), timedelta(days=400)).map(NOON.__add__))
    beside = draw(st.none() | st.sampled_from([-MICROSECOND, timedelta(0), MICROSECOND]))
    return anywhere if beside is None else schedule.latest_until(anywhere) + beside


@st.composite
def cases(draw, schedule=None):
    """Draw what `plan` is asked about: a few ticks that nobody knows of, and perhaps a hint of the next ones."""
    schedule = schedule or draw(st.sampled_from(SCHEDULES))
    now = draw(instants(schedule))
    known = schedule.latest_until(now)
    for _ in range(draw(st.integers(0, 15) | st.just(MAX_OLDER_TICKS + 5))):
        known = schedule.latest_until(known - MICROSECOND)
    hint = draw(st.none() | st.sampled_from([-HOUR, timedelta(0), CLOCK_TOLERANCE, 3 * CLOCK_TOLERANCE, HOUR]))
    due_hint = None if hint is None else schedule.latest_until(now + hint)
    if draw(st.booleans()):
        known -= draw(spans(HOUR))
    return {"now": now, "newest_recorded": known, "schedule": schedule, "due_hint": due_hint} | draw(rules)


def decided(decisions):
    """List the ticks that are decided about, newest first."""
    return [tick for decision in decisions for tick in decision.ticks]


def claimed(tick, reason=None):
    return TickDecision((tick,), "claimed", reason)


def due(case):
    """Return the tick that a scheduler with these clocks has to look after."""
    now, hint = case["now"], case["due_hint"]
    believed = hint is not None and hint <= now + CLOCK_TOLERANCE
    return max(case["schedule"].latest_until(now), hint) if believed else case["schedule"].latest_until(now)


# What holds always


@whole_only
@given(cases())
def test_every_tick_since_the_newest_known_one_gets_one_decision_but_for_the_oldest_beyond_what_is_remembered(case):
    ticks, tick = [], case["schedule"].next_after(case["newest_recorded"])
    while tick <= due(case):
        ticks.append(tick)
        tick = case["schedule"].next_after(tick)

    assert decided(decide_ticks(**case)) == ticks[::-1][: MAX_OLDER_TICKS + 1]


@whole_only
@given(cases())
def test_no_tick_is_decided_about_before_its_time_but_for_what_the_tolerance_allows(case):
    assert all(tick <= case["now"] + CLOCK_TOLERANCE for tick in decided(decide_ticks(**case)))
    assert all(tick <= case["now"] for tick in decided(decide_ticks(**case | {"due_hint": None})))


@whole_only
@given(cases())
def test_a_tick_is_claimed_if_it_is_on_time_or_may_be_caught_up(case):
    newest = next(iter(decide_ticks(**case)), None)
    age = case["now"] - due(case)
    caught_up = case["catch_up"] == "once" and age < case["window"]

    if due(case) <= case["newest_recorded"]:
        assert newest is None
    elif age <= MISFIRE_GRACE:
        assert newest == claimed(due(case))
    elif caught_up:
        assert newest == claimed(due(case), "catch_up")
    else:
        assert newest == TickDecision((due(case),), "missed", "skip" if case["catch_up"] == "skip" else None)


@whole_only
@given(cases())
def test_older_ticks_within_the_window_are_coalesced_unless_late_ones_are_skipped_and_others_are_missed(case):
    decisions = decide_ticks(**case)
    late = case["now"] - due(case) > MISFIRE_GRACE
    within = ("missed", "skip") if late and case["catch_up"] == "skip" else ("coalesced", None)

    for record in decisions[1:]:
        for tick in record.ticks:
            assert (record.state, record.reason) == (
                within if case["now"] - tick < case["window"] else ("missed", None)
            )


@whole_only
@given(cases(EVERY_MINUTE), st.lists(st.tuples(st.timedeltas(-HOUR, HOUR), st.booleans()), max_size=8))
def test_of_many_looks_by_clocks_that_jump_no_two_decide_about_one_tick(case, looks):
    seen, now = [], case["now"]
    for jump, hinted in looks:
        now += jump
        case |= {"now": now, "due_hint": case["schedule"].next_after(now) if hinted else None}
        seen += decided(decide_ticks(**case))
        case["newest_recorded"] = max([case["newest_recorded"], *seen])

    assert len(seen) == len(set(seen))
