"""Times as people write them: an instant, a time of day, or a time from now (`2h`).  All in UTC."""

from __future__ import annotations

import re
from datetime import UTC, datetime, time, timedelta

from forgekeeper.cli.console import wrong_use

YEARS = range(2000, 9000)
UNITS = ("weeks", "days", "hours", "minutes", "seconds")
DURATION = re.compile(r"\+?(?:(\d{1,4})w)?(?:(\d{1,5})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,9})s)?", re.ASCII)
"""So few digits that a time from now is always one that PostgreSQL knows."""
CLOCK = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?", re.ASCII)
FORMS = "08:30, 2h or 2026-11-20T08:30"
DAY = timedelta(days=1)


def read(text: str, now: datetime, *, ahead: bool) -> datetime:
    """Read a time to come, such as the next 08:30, or one that has passed if not *ahead*.  Raises `Problem`."""
    text = text.strip()
    if (match := DURATION.fullmatch(text.lower())) and any(match.groups()):
        duration = timedelta(**{unit: int(count or 0) for unit, count in zip(UNITS, match.groups(), strict=True)})
        return now + (duration if ahead else -duration)
    try:
        if CLOCK.fullmatch(text):
            clock = time.fromisoformat(f"0{text}" if text[1] == ":" else text)
            today = datetime.combine(now.astimezone(UTC).date(), clock, UTC)
            if ahead:
                return today if today > now else today + DAY
            return today if today <= now else today - DAY
        found = datetime.fromisoformat(text)
    except ValueError:
        wrong_use(f"{text!r} is not a time: write it as {FORMS}, in UTC")
    if found.year not in YEARS:
        wrong_use(f"that time is out of range: give a year from {YEARS.start} to {YEARS.stop - 1}")
    return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)
