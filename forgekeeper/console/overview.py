"""The first screen: what one asks at night, in that order; then where one is; then each batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from statistics import median
from typing import Any, NamedTuple

from forgekeeper.audit import lookup
from forgekeeper.batches import BATCHES, BatchSpec
from forgekeeper.cli import process_list, status
from forgekeeper.cli.audit import filled, subjects
from forgekeeper.cli.terminal import lasting, moment
from forgekeeper.console import where
from forgekeeper.console.backlogs import BACKLOGS
from forgekeeper.console.drawing import line
from forgekeeper.console.pages import Asked, page
from forgekeeper.runs import breaker
from forgekeeper.runs.holds import Batch
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.totals import RunTotal
from forgekeeper.settings import Settings
from forgekeeper.storage.outbox import DeletedObject
from metrics.exporter import switched_off

DAYS, TIMES = 14, 2
"""An amount is unusual that is more than so many times the largest of so many days before."""
TICKS, COUNTED = 60, 10_000
"""So many ticks are drawn, and so many objects are counted, no more."""
LATE = timedelta(minutes=1)
"""A scheduler has looked at a tick by then, or there is something wrong."""
KEPT = ("stopped", "held", "paused")
LIGHTS = ("stopped", "held", "blocked", "paused", "off", "failing", "unserved", "missed", "late")
"""What a batch shows is the first of these that it is; else it runs, or is fine."""

Facts = Mapping[str, Any]


class Undone(NamedTuple):
    """Why what is due to these batches is not done, in a word and a sentence, and since when."""

    batches: Sequence[str]
    word: str
    since: datetime | None
    sentence: str


@page("/", "overview.html", "Now")
def overview(asked: Asked) -> dict[str, Any]:
    """Show what is deleted, stopped, not deleted, failing, and can be undone; where one is; and every batch."""
    settings, found = asked.settings, status.gather(asked.settings)
    known = {row.name: row for row in Batch.select().order_by(Batch.name)}
    looked_at = (JobRun.id, JobRun.tick, JobRun.state, JobRun.reason)
    ticks = {name: list(JobRun.of(name).select(*looked_at).limit(TICKS)) for name in BATCHES}
    undone = list(_undone(found, known, ticks))
    return found | {
        "amounts": _amounts(found, known, settings.breaker_least),
        "rule": {"times": TIMES, "days": DAYS, "least": settings.breaker_least, "share": settings.breaker_share},
        "undone": undone,
        "counted": COUNTED,
        "outbox": DeletedObject.recoverable(COUNTED + 1),
        "grace": settings.object_grace,
        "restored": list(_restored(settings, found["at"])),
        "where": where.facts(settings, found["redis"]["trouble"]),
        "rows": {name: _row(name, one, ticks[name], undone) for name, one in found["batches"].items()},
    }


def _amounts(found: Facts, known: Mapping[str, Batch], least: int) -> dict[str, Facts]:
    """Say how much each batch has deleted today and on the days before, and what lets it go on or does not."""
    today, amounts = found["at"].astimezone(UTC).date(), dict[str, Facts]()
    by_day = RunTotal.by_day(today, DAYS + 1)
    for name, row in known.items():
        if name in BATCHES and BATCHES[name].deletes:
            # Of days before it was there nothing is usual.
            there = (today - row.registered_at.astimezone(UTC).date()).days
            before = by_day[name][1 : there + 1]
            released = row.released_at is not None and breaker.released(name)
            amounts[name] = {
                "today": by_day[name][0],
                "before": before,
                "usual": round(median(before)) if before else None,
                "unusual": bool(before) and by_day[name][0] > max(least, TIMES * max(before)),
                "breaker": BATCHES[name].stake is not None,
                "brake": found["batches"][name]["held"],
                "release": row if released else None,
                "left": RunTotal.used(name, breaker.NEXT).released if released else None,
            }
    return amounts


def _undone(found: Facts, known: Mapping[str, Batch], ticks: Mapping[str, Sequence[JobRun]]) -> Iterator[Undone]:
    if not any(one["kind"] == "scheduler" and not one["silent"] for one in found["processes"]):
        said = "no scheduler lives: nothing is sent when it is due"
        yield Undone([*BATCHES], "unserved", _heard(found, "scheduler"), said)
    for queue in [queue for queue, one in found["queues"].items() if not one["workers"]]:
        served = [one.name for one in BATCHES.values() if queue in {each.queue for each in (one, *one.children)}]
        yield Undone(served, "unserved", _heard(found, "worker", queue), f"no worker takes from queue {queue}")
    schedules = {name: process_list.cron(one["schedule"]) for name, one in found["batches"].items()}
    for off in switched_off({name: row.registered_at for name, row in known.items()}, schedules):
        why = "its cron is off: it has no schedule" if off.by == "cron_off" else "its flag is off"
        yield Undone([off.batch], "off", off.since, why)
    for name, one in found["batches"].items():
        yield from _held_up(BATCHES[name], one, found["at"])
        yield from _missed(name, schedules[name], known.get(name), ticks[name], found["at"])


def _heard(found: Facts, kind: str, queue: str | None = None) -> datetime | None:
    """Say when the last of them was heard of; None where the list has forgotten it, or never had one."""
    these = (one for one in found["processes"] if one["kind"] == kind and queue in {None, *(one["queues"] or ())})
    return max((one["alive_at"] for one in these), default=None)


def _held_up(batch: BatchSpec, one: Facts, instant: datetime) -> Iterator[Undone]:
    """Say what keeps a batch from running, whether it fails, and whether what is due has waited for too long."""
    if why := next((word for word in KEPT if one[word]), None):
        yield Undone([batch.name], why, min(hold["since"] for hold in one["holds"]), "see what is stopped")
    if one["blocked"]:
        yield Undone([batch.name], "blocked", one["blocked"]["since"], one["blocked"]["sentence"])
    health = JobRun.health(batch.name)
    if health.failures:
        times = "once" if health.failures == 1 else f"{health.failures} times"
        error = (one["open"] or {}).get("error") or (one["last"] or {}).get("error") or "see its runs"
        said = f"it has failed {times} since it last ended well: {error}"
        yield Undone([batch.name], "failing", health.last_success, said)
    allowed, oldest = _objective(batch), one["backlog_oldest"]
    if allowed and oldest and instant - oldest > allowed:
        waits = f"the oldest waits for {lasting(instant - oldest)}, its objective is {lasting(allowed)}"
        yield Undone([batch.name], "late", oldest + allowed, waits)


def _missed(name: str, schedule: Any, row: Batch | None, ticks: Sequence[JobRun], at: datetime) -> Iterator[Undone]:
    """Say which ticks had no run since the last that did, and which none has looked at."""
    unrun = takewhile(lambda run: run.state in ("missed", "skipped", "coalesced"), ticks)
    if missed := [run.tick for run in unrun if run.state == "missed"]:
        which = "a tick was missed" if len(missed) == 1 else f"{len(missed)} ticks in a row were missed"
        yield Undone([name], "missed", missed[-1], f"{which}: no scheduler was running")
    newest = max((run.tick for run in ticks if run.tick), default=row and row.registered_at)
    due = schedule and schedule.newest(at - LATE)
    if due and newest and newest < due:
        yield Undone([name], "missed", schedule.after(newest), f"no scheduler has looked at its tick of {moment(due)}")


def _objective(batch: BatchSpec) -> timedelta | None:
    """Return how long what is due to the batch may wait: of what its backlog counts, the shortest."""
    counted = (record for one in (batch, *batch.children) for record in one.records if record.name in one.backlogs)
    return min((record.objective for record in counted if record.objective), default=None)


def _restored(settings: Settings, instant: datetime) -> Iterator[Facts]:
    """Say what can be undone of the newest deletions of each kind, and until when, as its document declares."""
    for one in subjects():
        if one.undone and one.batch and one.record:
            last = lookup.last_of(one.batch, one.record, instant - timedelta(days=DAYS))
            record = next(iter(last.records()), {}) if last else {}
            until = last and one.kept and last.at + getattr(settings, one.kept)
            command = last and one.restore and not (until and until < instant) and filled(one.restore, record)
            yield {"kind": one, "line": last, "until": until, "command": command}


def _row(name: str, one: Facts, ticks: Sequence[JobRun], undone: Sequence[Undone]) -> dict[str, Any]:
    words = {each.word for each in undone if name in each.batches}
    if one["children_failing"] or (one["last"] and one["last"]["state"] == "failed"):
        words.add("failing")
    running = one["open"] and one["open"]["state"] == "started"
    counts, since = BACKLOGS.of(name)
    return {
        "light": next((word for word in LIGHTS if word in words), "running" if running else "ok"),
        "objective": _objective(BATCHES[name]),
        "last": one["last"] and status.ended(one),
        "line": line([*counts, one["backlog"]], 120, 24),
        "since": since,
        "ticks": ticks[::-1],
    }
