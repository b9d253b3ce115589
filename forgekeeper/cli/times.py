"""Times as people write them: an instant, a time of day, or a time from now (`2h`).  All in UTC."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, time, timedelta

from forgekeeper.cli.console import WRONG_USE, Problem

YEARS = range(2000, 9000)
FORMS_PAST = "08:30, 2h or 2026-11-20T08:30"
FORMS_TO_COME = "06:00, tomorrow 06:00, 2h or 2026-11-20T08:30"
UNITS = ("weeks", "days", "hours", "minutes", "seconds")
DURATION = re.compile(r"\+?(?:(\d{1,5})w)?(?:(\d{1,6})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,9})s)?", re.ASCII)
CLOCK = re.compile(r"(?:(today|tomorrow)\s+)?(\d{1,2}:\d{2}(?::\d{2})?)", re.ASCII)
DAY = timedelta(days=1)

FromNow = Callable[[datetime], datetime]


class NoTime(Problem):
    """The text is not a time; the message says what one looks like."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, WRONG_USE)


def past(text: str) -> FromNow:
    """Read a time that has passed, such as the last 08:30; return a function of the present.  Raises `NoTime`."""
    return _read(text, ahead=False)


def to_come(text: str) -> FromNow:
    """Read a time to come, such as the next 08:30; return a function of the present.  Raises `NoTime`.

    `today 06:00` may have passed.
    """
    return _read(text, ahead=True)


def _read(text: str, *, ahead: bool) -> FromNow:
    plain = text.strip().lower()
    if (match := DURATION.fullmatch(plain)) and any(match.groups()):
        duration = timedelta(**{unit: int(count or 0) for unit, count in zip(UNITS, match.groups(), strict=True)})
        return lambda now: _after(now, duration if ahead else -duration)
    try:
        if match := CLOCK.fullmatch(plain):
            clock = time.fromisoformat(match[2].zfill(len("00:00") if match[2].count(":") == 1 else len("00:00:00")))
            return lambda now: _at(clock, match[1], now, ahead=ahead)
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        forms = FORMS_TO_COME if ahead else FORMS_PAST
        raise NoTime(f"{text!r} is not a time: write it as {forms}, in UTC") from None
    if found.year not in YEARS:
        raise _no_year()
    fixed = found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)
    return lambda _now: fixed


def _at(clock: time, day: str | None, now: datetime, *, ahead: bool) -> datetime:
    today = datetime.combine(now.astimezone(UTC).date(), clock, UTC)
    if day == "tomorrow" or (day is None and ahead and today <= now):
        return today + DAY
    if day is None and not ahead and today > now:
        return today - DAY
    return today


def _after(now: datetime, duration: timedelta) -> datetime:
    try:
        end = now + duration
    except OverflowError:
        raise _no_year() from None
    if end.year not in YEARS:
        raise _no_year()
    return end


def _no_year() -> NoTime:
    return NoTime(f"that time is out of range: give a year from {YEARS.start} to {YEARS.stop - 1}")
