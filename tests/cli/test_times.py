"""Times as people write them."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgekeeper.cli import times

NOW = datetime(2026, 11, 20, 8, 30, tzinfo=UTC)

NOWS = st.integers(0, 10**11).map(lambda seconds: datetime(2001, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds))


def test_an_instant_without_a_zone_is_in_utc():
    assert times.instant("2026-11-20T08:30") == NOW


def test_an_instant_with_a_zone_is_led_to_utc():
    assert times.instant("2026-11-20T10:30+02:00") == NOW


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("+2h", "2026-11-20T10:30"),
        ("2h", "2026-11-20T10:30"),
        ("90m", "2026-11-20T10:00"),
        ("+1h30m", "2026-11-20T10:00"),
        ("1d", "2026-11-21T08:30"),
        ("30s", "2026-11-20T08:30:30"),
        (" +2H ", "2026-11-20T10:30"),
        ("06:00", "2026-11-21T06:00"),
        ("9:00", "2026-11-20T09:00"),
        ("08:30", "2026-11-21T08:30"),
        ("today 09:00", "2026-11-20T09:00"),
        ("today 06:00", "2026-11-20T06:00"),
        ("tomorrow 06:00", "2026-11-21T06:00"),
        ("Tomorrow 23:59:59", "2026-11-21T23:59:59"),
        ("2026-12-01", "2026-12-01T00:00"),
        ("2026-12-01T08:30+02:00", "2026-12-01T06:30"),
    ],
)
def test_a_time_to_come_is_read_as_it_is_meant(text, expected):
    assert times.to_come(text)(NOW) == datetime.fromisoformat(expected).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    "text", ["", "+", "h", "tomorrow", "25:00", "06:60", "2 h", "-2h", "+2w", "6", "²h", "next 06:00"]
)
def test_what_is_no_time_to_come_is_refused_with_some_that_are(text):
    with pytest.raises(times.NoTime, match="tomorrow 06:00"):
        times.to_come(text)(NOW)


@pytest.mark.parametrize("text", ["999999d 999999h", "999999d999999h", "9999-12-31", "0001-01-01", "999999d"])
def test_a_time_at_the_end_of_the_calendar_is_refused(text):
    with pytest.raises(times.NoTime):
        times.to_come(text)(datetime(8999, 12, 31, tzinfo=UTC))


@given(now=NOWS, seconds=st.integers(1, 10**8))
def test_a_duration_ends_so_long_from_now(now, seconds):
    assert times.to_come(f"+{seconds}s")(now) == now + timedelta(seconds=seconds)


@given(now=NOWS, hour=st.integers(0, 23), minute=st.integers(0, 59))
def test_a_time_of_day_comes_within_a_day_and_is_that_time(now, hour, minute):
    found = times.to_come(f"{hour:02}:{minute:02}")(now)

    assert now < found <= now + timedelta(days=1)
    assert (found.hour, found.minute, found.second) == (hour, minute, 0)


@given(now=NOWS, hour=st.integers(0, 23), minute=st.integers(0, 59))
def test_tomorrow_is_the_day_after_that_of_now(now, hour, minute):
    assert times.to_come(f"tomorrow {hour}:{minute:02}")(now).date() == now.date() + timedelta(days=1)


@given(text=st.text(max_size=30))
def test_any_text_is_a_time_or_refused(text):
    try:
        found = times.to_come(text)(NOW)
    except times.NoTime:
        return
    assert found.utcoffset() == timedelta(0)
