"""Times as people write them."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgekeeper.cli.terminal import Problem, read_time
from tests.harness.every import every
from tests.harness.thorough import whole_only

NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
TO_COME = {
    "+2h": NOON + 2 * HOUR,
    "90m": NOON + 90 * MINUTE,
    "1d12h": NOON + DAY + 12 * HOUR,
    "12:01": NOON + MINUTE,
    "12:00": NOON + DAY,
    " 6:00 ": NOON + 18 * HOUR,
    "2026-11-21T08:30": datetime(2026, 11, 21, 8, 30, tzinfo=UTC),
    "2026-11-21T08:30+02:00": datetime(2026, 11, 21, 6, 30, tzinfo=UTC),
}
PAST = {
    "2h": NOON - 2 * HOUR,
    "1w": NOON - 7 * DAY,
    "12:00": NOON,
    "12:01": NOON - DAY + MINUTE,
    "9:30:15": NOON.replace(hour=9, minute=30, second=15),
    "2026-11-19T18:29": datetime(2026, 11, 19, 18, 29, tzinfo=UTC),
}


@every("text", TO_COME)
def test_a_time_to_come_is_read_as_it_is_meant(text):
    assert read_time(text, NOON, ahead=True) == TO_COME[text]


@every("text", PAST)
def test_a_time_of_day_or_an_age_has_passed(text):
    assert read_time(text, NOON, ahead=False) == PAST[text]


@every("text", ["", "+", "h", "25:00", "12:60", "noon", "12", "tomorrow 06:00", "0001-01-01", "9999-12-31", "9999999d"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(Problem):
        read_time(text, NOON, ahead=True)


@whole_only
@given(st.text(), st.booleans())
def test_any_text_is_a_time_or_refused(text, ahead):
    try:
        found = read_time(text, NOON, ahead=ahead)
    except Problem:
        return
    assert found.tzinfo is UTC
