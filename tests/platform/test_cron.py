"""Schedules: what crontab(5) means by them, and which are refused."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forgekeeper.platform.settings.cron import BadCron, Cron, parse_schedule

MONDAY = datetime(2026, 6, 1, tzinfo=UTC)
EVERY_DAY = "sun mon tue wed thu fri sat"

DAYS = st.sampled_from(["*", "1", "31", "29", "*/9", "10-12,20"])
MONTHS = st.sampled_from(["*", "2", "*/5", "jan,dec", "3-7/2"])
WEEKDAYS = st.sampled_from(["*", "0", "7", "5-7", "mon-fri", "*/3", "6/1"])
SECONDS = st.sampled_from(["", "0", "*/7", "59", "3-9"])
TIMES = st.sampled_from(["* *", "0 0", "59 23", "*/15 *", "5/20 8-18", "0,30 */6", "7 12"])
INSTANTS = st.timedeltas(timedelta(days=-1_000), timedelta(days=30_000)).map(MONDAY.__add__)


@st.composite
def schedules(draw):
    day, weekday = draw(DAYS), draw(WEEKDAYS)
    if "*" not in (day, weekday):
        day = "*"
    month = draw(MONTHS) if day != "31" else "*"
    return Cron(f"{draw(SECONDS)} {draw(TIMES)} {day} {month} {weekday}")


@pytest.mark.parametrize(
    ("expression", "after", "expected"),
    [
        ("* * * * *", "06-01 00:00:00", "06-01 00:01:00"),
        ("* * * * * *", "06-01 00:00:00", "06-01 00:00:01"),
        ("30 * * * * *", "06-01 00:00:30", "06-01 00:01:30"),
        ("59 59 23 31 12 *", "06-01 00:00:00", "12-31 23:59:59"),
        ("5/20 * * * *", "06-01 00:05:00", "06-01 00:25:00"),
        ("7,3,40-41 * * * *", "06-01 00:07:00", "06-01 00:40:00"),
        ("0 6 * * ?", "06-01 06:00:00", "06-02 06:00:00"),
        ("0 0 1 JAN,Jul *", "06-01 00:00:00", "07-01 00:00:00"),
        ("0 0 1 jul-oct/2 *", "07-01 00:00:00", "09-01 00:00:00"),
        ("0 0 29 2 *", "06-01 00:00:00", "2028-02-29 00:00:00"),
        ("0 0 31 * *", "06-01 00:00:00", "07-31 00:00:00"),
    ],
)
def test_the_next_time_is_what_crontab_says(expression, after, expected):
    found = Cron(expression).next_after(moment(after))

    assert found == moment(expected)


@pytest.mark.parametrize(
    ("field", "days"),
    [
        ("*", EVERY_DAY),
        ("0", "sun"),
        ("7", "sun"),
        ("5-7", "sun fri sat"),
        ("fri-sun", "sun fri sat"),
        ("*/3", "sun wed sat"),
        ("4/2", "thu sat"),
        ("1,wed,5-6", "mon wed fri sat"),
    ],
)
def test_weekdays_count_from_sunday_which_is_0_and_7(field, days):
    schedule, week = Cron(f"0 0 * * {field}"), [MONDAY + timedelta(days=day) for day in range(-1, 6)]

    assert [f"{day:%a}".lower() for day in week if schedule.latest_until(day) == day] == days.split()


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("* * * *", "has 4 fields"),
        ("@daily", "has 1 fields"),
        ("60 * * * *", "Bad minute"),
        ("* * 0 * *", "Bad day-of-month"),
        ("* * * 0 *", "Bad month"),
        ("* * * * 8", "Bad day-of-week"),
        ("* * * * 5-1", "Bad day-of-week"),
        ("*/0 * * * *", "Bad minute"),
        ("* * * smarch *", "Bad month"),
        ("9" * 5_000 + " * * * *", "is not a cron expression"),
        ("* * 1 * 1", "both the day of the month and the day of the week"),
        ("0 0 30 2 *", "Bad day-of-month"),
    ],
    ids=lambda value: value[:20],
)
def test_a_wrong_schedule_is_refused_with_what_is_wrong(expression, complaint):
    with pytest.raises(BadCron) as refusal:
        Cron(expression)

    assert repr(expression) in str(refusal.value)
    assert complaint in str(refusal.value)


@pytest.mark.parametrize("text", ["off", " OFF "])
def test_off_is_no_schedule(text):
    assert parse_schedule(text) is None


@given(schedules(), INSTANTS)
@example(Cron("0 0 29 2 *"), datetime(2104, 2, 28, 23, 59, 59, tzinfo=UTC))
@example(Cron("* * * * * *"), MONDAY)
def test_an_instant_lies_between_its_newest_time_and_the_next(schedule, instant):
    newest = schedule.latest_until(instant)

    assert newest <= instant < schedule.next_after(newest)
    assert schedule.next_after(newest - timedelta(microseconds=1)) == newest
    assert schedule.get_next_fire_time(None, newest) == newest
    assert schedule.get_next_fire_time(newest, instant) == schedule.next_after(newest)


@pytest.mark.parametrize(
    ("expression", "period"),
    [
        ("* * * * * *", timedelta(seconds=1)),
        ("5/15 * * * *", timedelta(minutes=15)),
        ("0,10 * * * *", timedelta(minutes=50)),
        ("* 9-17 * * *", timedelta(hours=15, minutes=1)),
        ("* 0-1,22 * * *", timedelta(hours=20, minutes=1)),
        ("*/10 * 1,22 * * *", timedelta(hours=20, seconds=10)),
        ("* 0-1,30 * * * *", timedelta(minutes=29, seconds=1)),
        ("0 0 * * *", timedelta(days=1)),
        ("0 0 * * mon-fri", timedelta(days=3)),
        ("* * * * sun", timedelta(days=6, minutes=1)),
        ("* * 1,10 * *", timedelta(days=21, minutes=1)),
        ("0 0 31 * *", timedelta(days=61)),
        ("0 12 * 6 *", timedelta(days=337)),
        ("0 0 29 2 *", timedelta(days=8 * 365 + 1)),  # 2100 is no leap year
    ],
)
def test_the_period_is_the_longest_gap(expression, period):
    assert Cron(expression).longest_interval == period


def moment(text):
    """Read ``[2026-]06-01 00:00:00``."""
    return datetime.fromisoformat(text if text[4] == "-" else f"2026-{text}").replace(tzinfo=UTC)
