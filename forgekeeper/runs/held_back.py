"""What is held back: stopped, held, blocked, off by its flag or its timetable, or paused; and who is reminded when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple

from forgekeeper.batches import BATCHES
from forgekeeper.database import now
from forgekeeper.flags import FeatureFlag
from forgekeeper.runs.batch import FOREVER, Batch
from forgekeeper.runs.ledger import JobRun
from forgekeeper.settings import Settings

REMINDER = timedelta(days=7)
"""For so long something may be off, or paused without an end, before it may be one that was forgotten."""


class Off(NamedTuple):
    """A batch that is off by decision; *since* is no later than that, as far as anything remembers it."""

    batch: str
    reason: Literal["flag_off", "cron_off"]
    since: datetime


def idle(settings: Settings) -> set[str]:
    """Name the batches that are paused, stopped, held or on no timetable."""
    back = {row.name for rows in (Batch.all_paused(), Batch.all_stopped(), Batch.all_held()) for row in rows}
    return back | {name for name in BATCHES if settings.cron(name) is None}


def off(schedules: Mapping[str, object | None]) -> Iterator[Off]:
    """Yield what is off: by its flag, or as *schedules* have no entry for it; of batches that nobody knows, nothing."""
    registered = {row.name: row.registered_at for row in Batch.select()}
    for name, batch in BATCHES.items():
        if name not in registered:
            continue
        if schedules.get(name) is None:
            # Nobody notes when a cron is switched off: its last tick was still on time.
            yield Off(name, "cron_off", JobRun.newest_tick(name) or registered[name])
        if batch.flag is not None and not FeatureFlag.is_on(batch.flag):
            turned = FeatureFlag.get_or_none(FeatureFlag.name == batch.flag)
            yield Off(name, "flag_off", turned.updated_at if turned else registered[name])


def warnings(schedules: Mapping[str, object | None]) -> list[str]:
    """Return a sentence for each batch that is stopped, held or blocked, off for long, or paused without an end."""
    instant = now()
    return [
        *map(stopped, Batch.all_stopped()),
        *map(held, Batch.all_held()),
        *(_blocked(row) for row in Batch.all_blocked()),
        *(_off(one) for one in off(schedules) if instant - one.since >= REMINDER),
        *(_paused(row) for row in Batch.all_paused() if row.paused_until >= FOREVER),
    ]


def stopped(row: Batch) -> str:
    """Say of a batch that is stopped since when, by whom and why, and what ends that."""
    since = f"{_moment(row.stopped_since)} ({row.stopped_reason})"
    return f"{row.name} is stopped by {row.stopped_by} since {since}: `forgekeeper resume {row.name}` ends that"


def held(row: Batch) -> str:
    """Say of a batch that is held since when and why, and what ends that."""
    remedy = f"`forgekeeper release {row.name} --reason ...` lets it go"
    sentence = str(row.held_sentence).rstrip(". ")
    remedy = "" if "forgekeeper release" in sentence else f": {remedy}"
    return f"{row.name} is held since {_moment(row.held_since)} ({row.held_reason}): {sentence}{remedy}"


def _blocked(row: Batch) -> str:
    return f"{row.name} is blocked since {_moment(row.blocked_since)} ({row.blocked_reason}): {row.blocked_sentence}"


def _off(one: Off) -> str:
    if one.reason == "cron_off":
        remedy = f"set FORGEKEEPER_CRON_{one.batch.upper()} if that was forgotten"
        return f"{one.batch} is on no timetable, and has had no tick since {_moment(one.since)}: {remedy}"
    flag = BATCHES[one.batch].flag
    remedy = f"`forgekeeper flags on {flag}` if that was forgotten"
    return f"{one.batch} is off since {_moment(one.since)}, as flag {flag} is off: {remedy}"


def _paused(row: Batch) -> str:
    because = f" ({row.paused_reason})" if row.paused_reason else ""
    remedy = f"`forgekeeper resume {row.name}`, or `forgekeeper pause {row.name} --until TIME`"
    return (
        f"{row.name} is paused without an end by {row.paused_by} since {_moment(row.paused_since)}{because}: {remedy}"
    )


def _moment(instant: datetime | None) -> str:
    return instant.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S") if instant else "nobody knows when"
