"""The first screen: what one asks at night, in that order; then where one is; then each batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from statistics import median
from typing import Any, NamedTuple

from forgekeeper.audit import lookup
from forgekeeper.batches import BATCHES, BatchSpec
from forgekeeper.cli import process_list, status
from forgekeeper.cli.audit import filled, subjects
from forgekeeper.cli.terminal import lasting, moment
from forgekeeper.console import where
from forgekeeper.console.backlogs import BACKLOGS
from forgekeeper.console.drawing import Tick, sparkline, strip
from forgekeeper.console.pages import Asked, page
from forgekeeper.runs import breaker
from forgekeeper.runs.holds import BRAKES, BY_PEOPLE, Batch
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.totals import RunTotal
from forgekeeper.settings import Settings
from forgekeeper.storage.outbox import DeletedObject
from metrics.exporter import switched_off

DAYS, TIMES = 14, 2
"""An amount is unusual that is more than so many times the largest of so many days before."""
TICKS = 60
COUNTED = 10_000
"""So many objects are counted, no more."""
LOOKED_AT = (JobRun.id, JobRun.tick, JobRun.state, JobRun.reason, JobRun.claimed_at)
LATE = timedelta(minutes=1)
"""A scheduler has looked at a tick by then, or there is something wrong."""
LIGHTS = ("stopped", "held", "blocked", "paused", "off", "failing", "unserved", "missed", "late")
"""What a batch shows is the first of these that it is; else it runs, or is fine."""


class Amount(NamedTuple):
    """How much a batch has deleted *today*, and each day *before*; its *brake*, what is *left* of its *release*."""

    today: int
    before: Sequence[int]
    unusual: bool
    left: int | None
    release: Batch | None
    brake: Mapping[str, Any] | None

    @property
    def usual(self) -> int | None:
        """The middle one of the days before."""
        return round(median(self.before)) if self.before else None


class Undone(NamedTuple):
    """Why what is due to these batches is not done, in a word and a sentence, and since when."""

    batches: Sequence[str]
    word: str
    since: datetime | None
    sentence: str


@page("/", "overview.html", "Now", place="Now")
def overview(asked: Asked) -> dict[str, Any]:
    """Show what is deleted, stopped, not deleted, failing, and can be undone; where one is; and every batch."""
    found = status.gather(asked.settings)
    known = {row.name: row for row in Batch.select()}
    ticks = {name: list(reversed(JobRun.of(name).select(*LOOKED_AT).limit(TICKS))) for name in BATCHES}
    undone = list(_undone(found, known, ticks))
    failing = {name: one["children_failing"] for name, one in found["batches"].items() if one["children_failing"]}
    return found | {
        "amounts": _amounts(found, known, asked.settings),
        "rule": {"times": TIMES, "days": DAYS, "least": asked.settings.breaker_least},
        "breaker": asked.settings.breaker_share < 1,
        "holds": [(name, hold) for name, one in found["batches"].items() for hold in one["holds"]],
        "undone": undone,
        "failing": failing,
        "counted": COUNTED,
        "outbox": DeletedObject.recoverable(COUNTED + 1),
        "restored": list(_restored(found["at"])),
        "where": where.facts(asked.settings, found["redis"]["trouble"]),
        "serving": _serving(found),
        "rows": {name: _row(name, one, ticks[name], undone) for name, one in found["batches"].items()},
    }


def _amounts(found: Mapping[str, Any], known: Mapping[str, Batch], settings: Settings) -> dict[str, Amount]:
    today = found["at"].astimezone(UTC).date()
    by_day = RunTotal.by_day(today, DAYS + 1)
    amounts = {}
    for name, batch in BATCHES.items():
        if batch.deletes and (row := known.get(name)):
            # Of days before it was there nothing is usual.
            there = (today - row.registered_at.astimezone(UTC).date()).days
            holds = (hold for hold in found["batches"][name]["holds"] if hold["kind"] in BRAKES)
            amounts[name] = _amount(row, by_day[name], by_day[name][1 : there + 1], next(holds, None), settings)
    return amounts


def _amount(
    row: Batch, by_day: Sequence[int], before: Sequence[int], brake: Mapping[str, Any] | None, settings: Settings
) -> Amount:
    lets_go = row.released_at is not None and breaker.released(row.name)
    left = RunTotal.used(row.name, breaker.NEXT).released if lets_go else None
    unusual = bool(before) and by_day[0] > max(settings.breaker_least, TIMES * max(before))
    return Amount(by_day[0], before, unusual, left, row if lets_go else None, brake)


def _undone(
    found: Mapping[str, Any], known: Mapping[str, Batch], ticks: Mapping[str, Sequence[JobRun]]
) -> Iterator[Undone]:
    yield from _unserved(found)
    schedules = {name: process_list.cron(one["schedule"]) for name, one in found["batches"].items()}
    for each in switched_off({name: row.registered_at for name, row in known.items()}, schedules):
        why = "its cron is off: it has no schedule" if each.by == "cron_off" else "its flag is off"
        yield Undone([each.batch], "off", each.since, why)
    for name, one in found["batches"].items():
        yield from _kept(name, one)
        yield from _failing(name, one)
        yield from _missed(name, schedules[name], known.get(name), ticks[name], found["at"])
        yield from _old(BATCHES[name], one["backlog_oldest"], found["at"])


def _unserved(found: Mapping[str, Any]) -> Iterator[Undone]:
    """Say that there is no scheduler, or for which queue there is no worker."""
    if not any(one["kind"] == "scheduler" and not one["silent"] for one in found["processes"]):
        said = "no scheduler lives: nothing is sent when it is due"
        yield Undone([*BATCHES], "unserved", _heard(found, "scheduler"), said)
    for queue, one in found["queues"].items():
        if not one["workers"]:
            served = [
                name for name, batch in BATCHES.items() if queue in {each.queue for each in (batch, *batch.children)}
            ]
            yield Undone(served, "unserved", _heard(found, "worker", queue), f"no worker takes from queue {queue}")


def _heard(found: Mapping[str, Any], kind: str, queue: str | None = None) -> datetime | None:
    """Say when the last of them was heard of; None where the list has forgotten it, or never had one."""
    these = (one for one in found["processes"] if one["kind"] == kind and queue in {None, *(one["queues"] or ())})
    return max((one["alive_at"] for one in these), default=None)


def _kept(name: str, one: Mapping[str, Any]) -> Iterator[Undone]:
    why = next((word for word in ("stopped", "held", "paused") if one[word]), None)
    if why is not None:
        yield Undone([name], why, min(hold["since"] for hold in one["holds"]), "see what is stopped")
    if one["blocked"]:
        yield Undone([name], "blocked", one["blocked"]["since"], one["blocked"]["sentence"])


def _failing(name: str, one: Mapping[str, Any]) -> Iterator[Undone]:
    health = JobRun.health(name)
    if health.failures:
        times = "once" if health.failures == 1 else f"{health.failures} times"
        error = (one["open"] or {}).get("error") or (one["last"] or {}).get("error") or "see its runs"
        yield Undone([name], "failing", health.last_success, f"it has failed {times} since it last ended well: {error}")


def _missed(
    name: str, schedule: Any, row: Batch | None, ticks: Sequence[JobRun], instant: datetime
) -> Iterator[Undone]:
    """Say which ticks had no run since the last that did, and which none has looked at."""
    missed: list[JobRun] = []
    for run in ticks:
        missed = [*missed, run] if run.state == "missed" else missed if run.state in ("skipped", "coalesced") else []
    if missed:
        which = "a tick was missed" if len(missed) == 1 else f"{len(missed)} ticks in a row were missed"
        yield Undone([name], "missed", missed[0].tick, f"{which}: no scheduler was running")
    newest = max((run.tick for run in ticks if run.tick), default=row and row.registered_at)
    due = schedule and schedule.newest(instant - LATE)
    if due and newest and newest < due:
        yield Undone([name], "missed", schedule.after(newest), f"no scheduler has looked at its tick of {moment(due)}")


def objective(batch: BatchSpec) -> timedelta | None:
    """Return how long what is due to the batch may wait: of what its backlog counts, the shortest."""
    counted = (record for one in (batch, *batch.children) for record in one.records if record.name in one.backlogs)
    return min((record.objective for record in counted if record.objective), default=None)


def _old(batch: BatchSpec, oldest: datetime | None, instant: datetime) -> Iterator[Undone]:
    allowed = objective(batch)
    if allowed and oldest and instant - oldest > allowed:
        waits = f"the oldest waits for {lasting(instant - oldest)}, its objective is {lasting(allowed)}"
        yield Undone([batch.name], "late", oldest + allowed, waits)


def _restored(instant: datetime) -> Iterator[dict[str, Any]]:
    """Say what can be undone of the newest deletions of each kind, as its document declares."""
    for one in subjects():
        if one.undone and one.batch and one.record:
            line = lookup.last_of(one.batch, one.record, instant - timedelta(days=DAYS))
            record = next(iter(line.records()), {}) if line else {}
            yield {"kind": one, "line": line, "command": line and one.restore and filled(one.restore, record)}


def _serving(found: Mapping[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the schedulers, and who serves each queue."""
    schedulers = [one for one in found["processes"] if one["kind"] == "scheduler"]
    by_queue = [
        (queue, [one for one in found["processes"] if queue in (one["queues"] or ())]) for queue in found["queues"]
    ]
    return [("timetable", schedulers), *by_queue]


def _row(name: str, one: Mapping[str, Any], ticks: Sequence[JobRun], undone: Sequence[Undone]) -> dict[str, Any]:
    counts, since = BACKLOGS.of(name)
    words = {each.word for each in undone if name in each.batches}
    said = f"Backlog of {name} since {moment(since)}" if since else f"Backlog of {name}, not known for long"
    return {
        "light": _light(one, words),
        "objective": objective(BATCHES[name]),
        "last": one["last"] and status.ended(one),
        "line": sparkline([*counts, one["backlog"]], 120, 24, said),
        "strip": strip([_tick(run) for run in ticks], f"Last {TICKS} ticks of {name}, the newest at the right"),
        "people": any(hold["kind"] in BY_PEOPLE for hold in one["holds"]),
        "brakes": any(hold["kind"] in BRAKES for hold in one["holds"]),
    }


def _light(one: Mapping[str, Any], words: set[str]) -> str:
    """Say in a word how a batch does: what keeps it from running comes before how it runs."""
    if one["children_failing"] or (one["last"] and one["last"]["state"] == "failed"):
        words = words | {"failing"}
    running = bool(one["open"]) and one["open"]["state"] == "started"
    return next((word for word in LIGHTS if word in words), "running" if running else "ok")


def _tick(run: JobRun) -> Tick:
    what = moment(run.tick) if run.tick else f"by hand, {moment(run.claimed_at)}"
    return Tick(run.state, f"/runs/{run.id}", " ".join(filter(None, (what, run.state, run.reason))))
