"""Times as people write them: an instant, a time of day, or a time from now (`2h`).  All in UTC."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, time, timedelta
from typing import NoReturn

from forgekeeper.cli.console import wrong_use

YEARS = range(2000, 9000)
UNITS = ("weeks", "days", "hours", "minutes", "seconds")
DURATION = re.compile(r"\+?(?:(\d{1,5})w)?(?:(\d{1,6})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,9})s)?", re.ASCII)
CLOCK = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?", re.ASCII)
FORMS = "08:30, 2h or 2026-11-20T08:30"
DAY = timedelta(days=1)

FromNow = Callable[[datetime], datetime]


def past(text: str) -> FromNow:
    """Read a time that has passed, such as the last 08:30; return a function of the present.  Raises `Problem`."""
    return _read(text.strip(), ahead=False)


def to_come(text: str) -> FromNow:
    """Read a time to come, such as the next 08:30; return a function of the present.  Raises `Problem`."""
    return _read(text.strip(), ahead=True)


def _read(text: str, *, ahead: bool) -> FromNow:
    if (match := DURATION.fullmatch(text.lower())) and any(match.groups()):
        duration = timedelta(**{unit: int(count or 0) for unit, count in zip(UNITS, match.groups(), strict=True)})
        return lambda now: _after(now, duration if ahead else -duration)
    try:
        if CLOCK.fullmatch(text):
            clock = time.fromisoformat(f"0{text}" if text[1] == ":" else text)
            return lambda now: _at(clock, now, ahead=ahead)
        found = datetime.fromisoformat(text)
    except ValueError:
        wrong_use(f"{text!r} is not a time: write it as {FORMS}, in UTC")
    if found.year not in YEARS:
        _refuse_year()
    fixed = found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)
    return lambda _now: fixed


def _at(clock: time, now: datetime, *, ahead: bool) -> datetime:
    today = datetime.combine(now.astimezone(UTC).date(), clock, UTC)
    if ahead:
        return today if today > now else today + DAY
    return today if today <= now else today - DAY


def _after(now: datetime, duration: timedelta) -> datetime:
    try:
        end = now + duration
    except OverflowError:
        _refuse_year()
    if end.year not in YEARS:
        _refuse_year()
    return end


def _refuse_year() -> NoReturn:
    wrong_use(f"that time is out of range: give a year from {YEARS.start} to {YEARS.stop - 1}")
