"""Due records that are not deleted, with reason and time, for `status` and the console."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import takewhile
from typing import Any, NamedTuple

from forgekeeper.api.batches import BATCHES, BatchSpec
from forgekeeper.cli import process_list
from forgekeeper.cli.terminal import format_duration, format_time
from forgekeeper.ledger.holds import Batch
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.switched_off import find_switched_off
from forgekeeper.platform.settings.cron import Cron

MAX_EXAMINED_TICKS = 60
"""Ticks per batch that are examined for missed ones."""
UNCLAIMED_AFTER = timedelta(minutes=1)
"""Delay after which a tick that no scheduler has claimed counts as missed."""
HOLDING_STATES = ("stopped", "held", "paused")
"""States of held batches: `status` and the console list them with their reasons."""
STATES_TO_WARN_OF = ("failing", "late", "missed")
"""States with no other warning."""

StatusFacts = Mapping[str, Any]


class NotDeleted(NamedTuple):
    """Reason why due records of *batches* are not deleted, and since when (None if unknown)."""

    batches: Sequence[str]
    word: str
    since: datetime | None
    sentence: str


def find_not_deleted(found: StatusFacts) -> Iterator[NotDeleted]:
    """Yield the reasons in the facts that `status` has *found*; needs a connection."""
    known = {row.name: row.registered_at for row in Batch.select(Batch.name, Batch.registered_at)}
    if not any(one["kind"] == "scheduler" and not one["silent"] for one in found["processes"]):
        said = "no scheduler is running: due runs are not sent"
        yield NotDeleted([*BATCHES], "unserved", _last_heartbeat(found, "scheduler"), said)
    for queue in [queue for queue, one in found["queues"].items() if not one["workers"]]:
        served = [one.name for one in BATCHES.values() if queue in {each.queue for each in (one, *one.children)}]
        yield NotDeleted(served, "unserved", _last_heartbeat(found, "worker", queue), f"no worker serves queue {queue}")
    schedules = {name: process_list.parse_known_schedule(one["schedule"]) for name, one in found["batches"].items()}
    for off in find_switched_off(known, schedules):
        why = "its cron is off: it has no schedule" if off.by == "cron_off" else "its flag is off"
        yield NotDeleted([off.batch], "off", off.since, why)
    for name, one in found["batches"].items():
        yield from _find_obstacles(BATCHES[name], one, found["at"])
        yield from _find_missed_ticks(name, schedules[name], known.get(name), found["at"])


def describe_warnings(found: Iterable[NotDeleted]) -> Iterator[str]:
    """Yield a sentence for each batch that fails, is late, or has missed a tick."""
    for one in found:
        if one.word in STATES_TO_WARN_OF:
            yield f"{', '.join(one.batches)}: {one.sentence}; see `forgekeeper why {one.batches[0]}`"


def _last_heartbeat(found: StatusFacts, kind: str, queue: str | None = None) -> datetime | None:
    """Return the last heartbeat of such a process; None if no such process is known."""
    these = (one for one in found["processes"] if one["kind"] == kind and queue in {None, *(one["queues"] or ())})
    return max((one["alive_at"] for one in these), default=None)


def _find_obstacles(batch: BatchSpec, one: StatusFacts, instant: datetime) -> Iterator[NotDeleted]:
    """Yield the batch's holds, its block, its failures, and a missed objective."""
    if why := next((word for word in HOLDING_STATES if one[word]), None):
        yield NotDeleted([batch.name], why, min(hold["since"] for hold in one["holds"]), "no run may begin")
    if one["blocked"]:
        yield NotDeleted([batch.name], "blocked", one["blocked"]["since"], one["blocked"]["sentence"])
    health = JobRun.read_health(batch.name)
    if health.failures:
        times = "once" if health.failures == 1 else f"{health.failures} times"
        error = (one["open"] or {}).get("error") or (one["last"] or {}).get("error") or "see its runs"
        said = f"it has failed {times} since its last success: {error}"
        yield NotDeleted([batch.name], "failing", health.last_success, said)
    allowed, oldest = batch.shortest_objective, one["backlog_oldest"]
    if allowed and oldest and instant - oldest > allowed:
        waited, objective = format_duration(instant - oldest), format_duration(allowed)
        waits = f"the oldest record has waited for {waited}, its objective is {objective}"
        yield NotDeleted([batch.name], "late", oldest + allowed, waits)


def _find_missed_ticks(
    name: str, schedule: Cron | None, registered: datetime | None, at: datetime
) -> Iterator[NotDeleted]:
    """Yield ticks missed since the last run, and ticks that no scheduler has claimed."""
    ticks = list(JobRun.select_newest_first(name).select(JobRun.tick, JobRun.state).limit(MAX_EXAMINED_TICKS))
    unrun = takewhile(lambda run: run.state in ("missed", "skipped", "coalesced"), ticks)
    if missed := [run.tick for run in unrun if run.state == "missed"]:
        which = "a tick was skipped" if len(missed) == 1 else f"{len(missed)} ticks in a row were skipped"
        yield NotDeleted([name], "missed", missed[-1], f"{which}: no scheduler was running")
    newest = max((run.tick for run in ticks if run.tick), default=registered)
    due = schedule and schedule.latest_until(at - UNCLAIMED_AFTER)
    if schedule and due and newest and newest < due:
        first = schedule.next_after(newest)
        which = (
            f"tick of {format_time(due)}" if first == due else f"ticks from {format_time(first)} to {format_time(due)}"
        )
        yield NotDeleted([name], "missed", first, f"no scheduler has claimed its {which}")
