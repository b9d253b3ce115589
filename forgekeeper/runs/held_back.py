"""What is held back: stopped, held, blocked, off by its flag or its timetable, or paused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from forgekeeper.batches import BATCHES, FeatureFlag
from forgekeeper.runs.holds import BRAKES, Batch, Hold
from forgekeeper.runs.ledger import JobRun
from forgekeeper.settings import Settings


class Off(NamedTuple):
    """A batch that is off by decision; *since* is no later than that, as far as anything remembers it."""

    batch: str
    reason: Literal["flag_off", "cron_off"]
    since: datetime


def idle(settings: Settings) -> set[str]:
    """Name the batches that are paused, stopped, held or on no timetable."""
    return {hold.batch for hold in Hold.standing()} | {name for name in BATCHES if settings.cron(name) is None}


def off(schedules: Mapping[str, object | None]) -> Iterator[Off]:
    """Yield what is off: by its flag, or as *schedules* have no entry for it; of unknown batches, nothing."""
    registered = {row.name: row.registered_at for row in Batch.select()}
    for name, batch in BATCHES.items():
        if name not in registered:
            continue
        if schedules.get(name) is None:
            # It is not recorded when a cron is switched off: its last tick was still on time.
            yield Off(name, "cron_off", JobRun.newest_tick(name) or registered[name])
        if batch.flag is not None and not FeatureFlag.is_on(batch.flag):
            turned = FeatureFlag.get_or_none(FeatureFlag.name == batch.flag)
            yield Off(name, "flag_off", turned.updated_at if turned else registered[name])


def warnings() -> list[str]:
    """Return a sentence for each batch that is stopped, held, blocked, or paused without an end."""
    holds = [hold for hold in Hold.standing() if hold.kind != "pause" or hold.until is None]
    return [*map(_hold, holds), *map(_blocked, Batch.blocked())]


def of(batch: str) -> list[str]:
    """Return a sentence for all that holds the batch back, and for its block."""
    return [*map(_hold, Hold.standing(batch=batch)), *map(_blocked, Batch.blocked(batch))]


def _hold(hold: Hold) -> str:
    batch, since, because = hold.batch, _moment(hold.since), f" ({hold.reason})" if hold.reason else ""
    if hold.kind in BRAKES:
        sentence = str(hold.reason).rstrip(". ")
        remedy = "" if "forgekeeper release" in sentence else f": `forgekeeper release {batch} --reason ...` lets it go"
        return f"{batch} is held since {since} ({hold.kind}): {sentence}{remedy}"
    if hold.kind == "stop":
        return f"{batch} is stopped by {hold.by} since {since}{because}: `forgekeeper resume {batch}` ends that"
    end = "without an end" if hold.until is None else f"until {_moment(hold.until)}"
    remedy = f"`forgekeeper resume {batch}`, or `forgekeeper pause {batch} --until TIME`"
    return f"{batch} is paused {end} by {hold.by} since {since}{because}: {remedy}"


def _blocked(row: Batch) -> str:
    return f"{row.name} is blocked since {_moment(row.blocked_since)} ({row.blocked_reason}): {row.blocked_sentence}"


def _moment(instant: datetime) -> str:
    return instant.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
