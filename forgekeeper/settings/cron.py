"""Read cron expressions the way crontab(5) does, in UTC.

Five fields, or six with the seconds first, or ``off``.  APScheduler computes the
times; its weekdays count from Monday, so ours are spelt out as names for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cached_property

from apscheduler.triggers.cron import CronTrigger

MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
EPOCH = datetime(2024, 1, 1, tzinfo=UTC)
"""Where a schedule is looked at: a leap year that begins on a Monday."""


class BadCron(ValueError):
    """The expression is not a schedule that can be kept."""


class Cron:
    """A schedule: the times at which a batch is due."""

    def __init__(self, expression: str) -> None:
        """Take five or six fields; raise `BadCron` with a sentence that says what is wrong."""
        self.expression = " ".join(expression.split())
        second, minute, hour, day, month, weekday = _fields(self.expression)
        if day != "*" and weekday != "*":
            raise BadCron(
                f"{self.expression!r} restricts both the day of the month and the day of the week; "
                "crontab joins them with 'or' and others with 'and': leave one of them '*'"
            )
        self._every_day = day == month == weekday == "*"
        try:
            self.trigger = CronTrigger(
                second=second,
                minute=minute,
                hour=hour,
                day=day,
                month=_month_numbers(month),
                day_of_week=_weekday_names(weekday),
                timezone=UTC,
            )
        except ValueError as error:
            raise BadCron(f"{self.expression!r} is not a cron expression: {error}") from None
        if self._first_from(EPOCH) is None:
            raise BadCron(f"{self.expression!r} never fires")

    def __str__(self) -> str:
        return self.expression

    def __repr__(self) -> str:
        return f"Cron({self.expression!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cron) and other.expression == self.expression

    def __hash__(self) -> int:
        return hash(self.expression)

    def after(self, instant: datetime) -> datetime:
        """Return the first time later than *instant*."""
        found = self._first_from(instant + timedelta(microseconds=1))
        assert found is not None, "the constructor refuses schedules that never fire"
        return found

    def newest(self, until: datetime) -> datetime:
        """Return the last time that is not later than *until*."""
        back = timedelta(seconds=2)
        while (found := self._first_from(until - back)) is None or found > until:
            back *= 4
        # Halving the step keeps a sparse schedule with dense hours cheap: two weekdays
        # of minutes ago is seventeen questions, not three thousand.
        while back > timedelta(seconds=1):
            back /= 2
            if (later := self.after(found + back - timedelta(seconds=1))) <= until:
                found = later
        while (later := self.after(found)) <= until:
            found = later
        return found

    def between(self, start: datetime, end: datetime) -> Iterator[datetime]:
        """Yield the times later than *start* and not later than *end*, oldest first."""
        tick = self.after(start)
        while tick <= end:
            yield tick
            tick = self.after(tick)

    @cached_property
    def period(self) -> timedelta:
        """The longest gap between two neighbouring times.

        Gaps repeat within a day, and from day to day only where days are restricted:
        a hundred neighbours and the nights of a year show the longest.
        """
        longest, tick = timedelta(0), self.after(EPOCH)
        for _ in range(100):
            tick, before = self.after(tick), tick
            longest = max(longest, tick - before)
        for night in range(1 if self._every_day else 366):
            midnight = EPOCH + timedelta(days=night + 1, microseconds=-1)
            longest = max(longest, self.after(midnight) - self.newest(midnight))
        return longest

    def _first_from(self, instant: datetime) -> datetime | None:
        found: datetime | None = self.trigger.get_next_fire_time(None, instant)
        return found


def parse(text: str) -> Cron | None:
    """Return the schedule that *text* names, None for ``off``; raise `BadCron`."""
    return None if text.strip().lower() == "off" else Cron(text)


def _fields(expression: str) -> list[str]:
    fields = expression.lower().split()
    if len(fields) == 5:
        fields.insert(0, "0")
    if len(fields) != 6:
        raise BadCron(
            f"{expression!r} has {len(fields)} fields; a schedule has five "
            "(minute hour day month weekday), or six with the second first, or is 'off'"
        )
    fields = ["*" if field == "?" else field for field in fields]
    for field in fields[:4]:
        if not re.fullmatch(r"[\d*/,-]+", field):
            raise BadCron(f"{expression!r} is not a cron expression: {field!r} is neither a number, a range nor a list")
    return fields


def _weekday_names(field: str) -> str:
    """Spell crontab's weekdays out: 0 and 7 are Sunday, a step counts from Sunday."""
    if field == "*":
        return field
    days = {day % 7 for day in _listed(field, WEEKDAYS, first=0, last=7, what="a weekday")}
    return ",".join(WEEKDAYS[day] for day in sorted(days))


def _month_numbers(field: str) -> str:
    """Spell the months out: APScheduler takes names, but drops a step after them."""
    if field == "*":
        return field
    months = _listed(field, MONTHS, first=1, last=12, what="a month")
    return ",".join(str(month) for month in sorted(months))


def _listed(field: str, names: tuple[str, ...], *, first: int, last: int, what: str) -> set[int]:
    """Return the numbers that a field of names and numbers stands for; names count from *first*."""

    def number(text: str) -> int:
        if text in names:
            return names.index(text) + first
        if text.isdigit() and first <= int(text) <= last:
            return int(text)
        raise BadCron(f"{text!r} is not {what}: use {first} to {last}, or {names[0]} to {names[-1]}")

    def part_of(part: str) -> range:
        match = re.fullmatch(r"(\*|(\w+)(?:-(\w+))?)(?:/(\d+))?", part)
        if match is None:
            raise BadCron(f"{part!r} is not {what}")
        everything, start_text, end_text, step = match.groups()
        highest = first + len(names) - 1
        start = first if everything == "*" else number(start_text)
        # "5/2" means "from the fifth on, every second", as everywhere else in a crontab.
        end = number(end_text) if end_text else (highest if everything == "*" or step else start)
        if end == 0 and start > 0:  # only a Sunday is 0
            end = 7
        if end < start or int(step or 1) < 1:
            raise BadCron(f"{part!r} is an empty range")
        return range(start, end + 1, int(step or 1))

    return {value for part in field.split(",") for value in part_of(part)}
