"""The first screen: what one asks at night, in that order; then where one is; then each batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from forgekeeper.audit import lookup
from forgekeeper.batches import BATCHES
from forgekeeper.cli import status
from forgekeeper.cli.amounts import DAYS, TIMES
from forgekeeper.cli.audit import filled, subjects
from forgekeeper.cli.not_deleted import HELD_BACK, objective
from forgekeeper.console import where
from forgekeeper.console.backlogs import BACKLOGS
from forgekeeper.console.drawing import line
from forgekeeper.console.pages import Asked, page
from forgekeeper.runs.ledger import JobRun
from forgekeeper.settings import Settings
from forgekeeper.storage.outbox import DeletedObject

TICKS, COUNTED = 60, 10_000
"""So many ticks are drawn, and so many objects are counted, no more."""
LIGHTS = ("stopped", "held", "blocked", "paused", "off", "failing", "unserved", "missed", "late")
"""What a batch shows is the first of these that it is; else it runs, or is fine."""

Facts = Mapping[str, Any]


@page("/", "overview.html", "Now")
def overview(asked: Asked) -> dict[str, Any]:
    """Show what is deleted, stopped, not deleted, failing, and can be undone; where one is; and every batch."""
    settings, found = asked.settings, status.gather(asked.settings)
    looked_at = (JobRun.id, JobRun.tick, JobRun.state, JobRun.reason)
    ticks = {name: list(JobRun.of(name).select(*looked_at).limit(TICKS)) for name in BATCHES}
    restored = list(_restored(settings, found["at"]))
    back = {one["kind"].batch for one in restored}
    return found | {
        "rule": {"times": TIMES, "days": DAYS, "least": settings.breaker_least, "share": settings.breaker_share},
        "counted": COUNTED,
        "freed": status.write_freed(found["batches"]),
        "outbox": DeletedObject.recoverable(COUNTED + 1),
        "grace": settings.object_grace,
        "restored": restored,
        "held_back": [name for one in found["not_deleted"] if one["word"] in HELD_BACK for name in one["batches"]],
        "undone": [one for one in found["not_deleted"] if one["word"] not in HELD_BACK],
        "lost": [name for name, batch in BATCHES.items() if batch.deletes and name not in back],
        "where": where.facts(settings, found["redis"]["trouble"]),
        "rows": {name: _row(name, one, ticks[name], found["not_deleted"]) for name, one in found["batches"].items()},
    }


def _restored(settings: Settings, instant: datetime) -> Iterator[Facts]:
    """Say what can be undone of the newest deletions of each kind, and until when, as its document declares.

    Objects that are due can be kept until a run deletes them: no time is said then.
    """
    is_waiting = DeletedObject.due(instant).exists()
    for one in subjects():
        if one.undone and one.batch and one.record:
            last = lookup.last_of(one.batch, one.record, instant - timedelta(days=DAYS))
            record = next(iter(last.records()), {}) if last else {}
            until = last and one.kept and last.at + getattr(settings, one.kept)
            until = None if until and until < instant and is_waiting else until
            restore = one.restore_run if one.restore_run and last and last.run is not None else one.restore
            facts = {"run": last and last.run, **record}
            command = last and restore and not (until and until < instant) and filled(restore, facts)
            obstacle = one.obstacle and one.obstacle()
            command = None if obstacle else command
            yield {"kind": one, "line": last, "until": until, "command": command, "obstacle": obstacle}


def _row(name: str, one: Facts, ticks: Sequence[JobRun], waiting: Sequence[Facts]) -> dict[str, Any]:
    words = {each["word"] for each in waiting if name in each["batches"]}
    if one["children_failing"] or (one["last"] and one["last"]["state"] == "failed"):
        words.add("failing")
    running = one["open"] and one["open"]["state"] == "started"
    counts, since = BACKLOGS.of(name)
    return {
        "light": next((word for word in LIGHTS if word in words), "running" if running else "ok"),
        "breaker": BATCHES[name].stake,
        "objective": objective(BATCHES[name]),
        "last": one["last"] and status.ended(one),
        "left": status.estimate_time_left(one),
        "line": line([*counts, one["backlog"]], 120, 24),
        "since": since,
        "ticks": ticks[::-1],
    }
