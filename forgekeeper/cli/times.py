"""Times as people write them: an instant, or one that is meant from now on (`+2h`, `tomorrow 06:00`).  All in UTC."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, time, timedelta

YEARS = range(2000, 9000)
FORMS = "2026-11-20T08:30"
FORMS_PAST = f"08:30, today 08:30 or {FORMS}"
FORMS_TO_COME = f"+2h, 90m, 06:00, tomorrow 06:00 or {FORMS}"
UNITS = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}
DURATION = re.compile(r"\+?(?:(?P<d>\d{1,6})d)?(?:(?P<h>\d{1,6})h)?(?:(?P<m>\d{1,6})m)?(?:(?P<s>\d{1,9})s)?", re.ASCII)
CLOCK = re.compile(
    r"(?:(?P<day>today|tomorrow)\s+)?(?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<second>\d{2}))?", re.ASCII
)

FromNow = Callable[[datetime], datetime]


class NoTime(Exception):
    """The text is not a time; the message says what one looks like."""


def instant(text: str, forms: str = FORMS) -> datetime:
    """Read an instant; without a zone it is in UTC.  Raises `NoTime`."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise NoTime(f"{text!r} is not a time: write it as {forms}, in UTC") from None
    if found.year not in YEARS:
        raise _no_year(text)
    return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)


def past(text: str) -> FromNow:
    """Read an instant; a time of day is the last one that has passed, seen from now.  Raises `NoTime`."""
    match = CLOCK.fullmatch(text.strip().lower())
    if match is None or match["day"] == "tomorrow":
        fixed = instant(text, FORMS_PAST)
        return lambda _now: fixed
    clock = _clock(text, match, FORMS_PAST)

    def at(now: datetime) -> datetime:
        today = datetime.combine(now.astimezone(UTC).date(), clock, UTC)
        return today if today <= now or match["day"] else today - timedelta(days=1)

    return at


def to_come(text: str) -> FromNow:
    """Read a time to come; return what says when that is, seen from now.  Raises `NoTime`.

    A time of day is the next one, or that of the day that is named: `today 06:00` may have passed.
    """
    plain = text.strip().lower()
    if match := DURATION.fullmatch(plain):
        parts = {UNITS[unit]: int(number) for unit, number in match.groupdict().items() if number}
        if parts:
            return _after(text, timedelta(**parts))
    if match := CLOCK.fullmatch(plain):
        return _at(text, match)
    try:
        fixed = instant(text.strip())
    except NoTime as error:
        if _is_iso(text):
            raise
        raise NoTime(f"{text!r} is not a time: write it as {FORMS_TO_COME}, in UTC") from error
    return lambda _now: fixed


def _after(text: str, duration: timedelta) -> FromNow:
    def after(now: datetime) -> datetime:
        try:
            end = now + duration
        except OverflowError:
            raise _no_year(text) from None
        if end.year not in YEARS:
            raise _no_year(text)
        return end

    return after


def _clock(text: str, match: re.Match[str], forms: str) -> time:
    try:
        return time(int(match["hour"]), int(match["minute"]), int(match["second"] or 0))
    except ValueError:
        raise NoTime(f"{text!r} is not a time: write it as {forms}, in UTC") from None


def _at(text: str, match: re.Match[str]) -> FromNow:
    clock, day = _clock(text, match, FORMS_TO_COME), match["day"]

    def at(now: datetime) -> datetime:
        today = datetime.combine(now.astimezone(UTC).date(), clock, UTC)
        tomorrow = today + timedelta(days=1)
        if day is None:
            return today if today > now else tomorrow
        return tomorrow if day == "tomorrow" else today

    return at


def _is_iso(text: str) -> bool:
    try:
        datetime.fromisoformat(text.strip())
    except ValueError:
        return False
    return True


def _no_year(text: str) -> NoTime:
    return NoTime(f"{text!r} is not a time of ours: give a year from {YEARS.start} to {YEARS.stop - 1}")
