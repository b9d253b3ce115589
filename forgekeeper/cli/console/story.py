"""Page of a tick or run: its events, children, deletions and log."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from forgekeeper.api.batches import BATCHES
from forgekeeper.audit import lookup
from forgekeeper.cli import audit, process_list, ticks
from forgekeeper.cli.connection import batch_named
from forgekeeper.cli.console.batch import limits
from forgekeeper.cli.console.drawing import spans
from forgekeeper.cli.console.pages import Asked, page
from forgekeeper.cli.running import numbered
from forgekeeper.cli.terminal import read_number, read_time
from forgekeeper.ledger.job_runs import OPEN, JobRun
from forgekeeper.ledger.processes import Process
from forgekeeper.ledger.quarantine import Quarantined
from forgekeeper.ledger.totals import RunTotal
from forgekeeper.platform.database import now
from forgekeeper.platform.settings import Settings

SHOWN, ROWS = 50, 1_000
"""Maximum children shown, and maximum rows of the audit added up."""
MOVING = timedelta(minutes=2)
"""Time after a run's end until its page stops renewing itself: children may begin later."""


class Child(NamedTuple):
    """A child of a run, with the times of the first and the last fact known about it."""

    name: str
    state: str
    since: datetime
    until: datetime | None
    said: str
    quarantined: int | None = None


@page("/runs/{run}", "story.html", "Run {run}")
def of_run(asked: Asked) -> dict[str, Any]:
    """Show a run by its number."""
    return _story(numbered(read_number(asked.path["run"], "a run")), asked.settings)


@page("/batches/{batch}/ticks", "story.html", "{batch}", query=("time",))
@page("/batches/{batch}/ticks/{time}", "story.html", "{batch}")
def of_tick(asked: Asked) -> dict[str, Any]:
    """Show a batch's tick, even if it has no row, or the newest run without ``time``."""
    name, text = batch_named(asked.path["batch"]).name, asked.path.get("time") or asked.query.get("time")
    tick = None if text is None else read_time(text, now(), ahead=False)
    if (run := ticks.at(name, tick)) is not None:
        return _story(run, asked.settings)
    return {
        "at": now(),
        "run": None,
        "batch": name,
        "title": f"A tick of {name}",
        "told": ticks.absent(name, tick, asked.settings),
        "holding": ticks.holding(name),
    }


def _story(run: JobRun, settings: Settings) -> dict[str, Any]:
    name, instant = run.batch, now()
    children = sorted(_children(run, instant), key=lambda one: one.since)
    answer, lines = audit.of_run(run.id, None, SHOWN, most=ROWS)
    recent = run.finished_at is not None and instant - run.finished_at < MOVING
    sent = [one.enqueued_as for one in BATCHES[name].children] if name in BATCHES else []
    return {
        "at": instant,
        "run": run,
        "batch": name,
        "title": f"Run {run.id} of {name}",
        "live": run.state in OPEN or recent or any(one.state == "started" for one in children),
        "open": run.state in OPEN,
        "told": ticks.timeline(run),
        "holding": ticks.holding(name),
        "result": ticks.result_of(run) or {},
        "sent": sum((run.result or {}).get(counter) or 0 for counter in sent),
        "children": children,
        "drawn": spans([(one.name, one.state, one.since, one.until or instant) for one in children]),
        "deleted": answer["sentences"],
        "lines": [audit.row_of(line) for line in lines],
        "limits": limits(settings, name, RunTotal.used(name, run.id)),
        "newer": JobRun.of(name).where(JobRun.id > run.id).order_by(JobRun.id).first(),
        "older": JobRun.of(name).where(JobRun.id < run.id).first(),
    }


def _children(run: JobRun, instant: datetime) -> Iterator[Child]:
    """Yield the run's children that are at work, have failed, or have deleted records."""
    named = set()
    for process in process_list.facts_of(Process.known(), instant):
        for work in process["at_work"]:
            if work["run"] == run.id and work["what"] != run.batch:
                where = f"{work['what']} on {process['host']}:{process['pid']}"
                named.add(work["message_id"])
                yield Child(work["message_id"], "started", work["since"], None, where)
    for row in Quarantined.oldest_first(batch=run.batch, kind="child").where(Quarantined.run == run.id).limit(SHOWN):
        named.add(row.key)
        yield Child(row.key, "failing", row.since, row.failed_at, row.error, row.id)
    for one in lookup.children(run.id, limit=SHOWN):
        if one.child not in {run.batch, *named}:
            yield Child(one.child, "done", one.first, one.last, f"rows in the audit: {one.rows:,}")
