"""Page of a tick or run: its events, children, deletions and log."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from forgekeeper.audit import lookup
from forgekeeper.cli import audit, process_list, ticks
from forgekeeper.cli.connection import batch_named
from forgekeeper.cli.console.batch import list_limits
from forgekeeper.cli.console.drawing import place_spans
from forgekeeper.cli.console.pages import PageRequest, page
from forgekeeper.cli.console.texts import TranslatableText
from forgekeeper.cli.running import require_run
from forgekeeper.cli.terminal import read_number, read_time
from forgekeeper.ledger.heartbeats import Process
from forgekeeper.ledger.job_runs import OPEN_STATES, JobRun
from forgekeeper.ledger.limits import RunTotal
from forgekeeper.ledger.quarantine import Quarantined
from forgekeeper.platform.database import now
from forgekeeper.platform.settings import Settings

MAX_SHOWN_CHILDREN, MAX_SUMMED_ROWS = 50, 1_000
"""Maximum children shown, and maximum rows of the audit added up."""
RENEWAL_AFTER_END = timedelta(minutes=2)
"""Time after a run's end until its page stops renewing itself: children may begin later."""


class ChildStory(NamedTuple):
    """A child of a run, with the times of the first and the last fact known about it."""

    name: str
    state: str
    since: datetime
    until: datetime | None
    message: str
    quarantine_id: int | None = None


@page("/runs/{run}", "story.html", TranslatableText("Run %(run)s"))
def show_run(request: PageRequest) -> dict[str, Any]:
    """Show a run by its number."""
    return _collect_story(require_run(read_number(request.path["run"], "a run")), request.settings)


@page("/batches/{batch}/ticks", "story.html", TranslatableText("%(batch)s"), query=("time",))
@page("/batches/{batch}/ticks/{time}", "story.html", TranslatableText("%(batch)s"))
def show_tick(request: PageRequest) -> dict[str, Any]:
    """Show a batch's tick, even if it has no row, or the newest run without ``time``."""
    name, text = batch_named(request.path["batch"]).name, request.path.get("time") or request.query.get("time")
    tick = None if text is None else read_time(text, now(), ahead=False)
    if (run := ticks.find_run(name, tick)) is not None:
        return _collect_story(run, request.settings)
    return {
        "at": now(),
        "run": None,
        "batch": name,
        "title": TranslatableText("A tick of %(batch)s", batch=name),
        "events": ticks.explain_absence(name, tick, request.settings),
        "holding": ticks.describe_obstacles(name),
    }


def _collect_story(run: JobRun, settings: Settings) -> dict[str, Any]:
    name, instant = run.batch, now()
    children = sorted(_list_children(run, instant), key=lambda one: one.since)
    answer, lines = audit.list_run_deletions(run.id, None, MAX_SHOWN_CHILDREN, max_summed_rows=MAX_SUMMED_ROWS)
    recent = run.finished_at is not None and instant - run.finished_at < RENEWAL_AFTER_END
    return {
        "at": instant,
        "run": run,
        "batch": name,
        "title": TranslatableText("Run %(run)s of %(batch)s", run=run.id, batch=name),
        "live": run.state in OPEN_STATES or recent or any(one.state == "started" for one in children),
        "open": run.state in OPEN_STATES,
        "events": ticks.build_timeline(run),
        "holding": ticks.describe_obstacles(name),
        "result": ticks.read_result(run) or {},
        "sent": ticks.count_sent_children(run),
        "children": children,
        "drawn": place_spans([(one.name, one.state, one.since, one.until or instant) for one in children]),
        "deleted": answer["sentences"],
        "lines": [audit.table_row(line) for line in lines],
        "limits": list_limits(settings, name, RunTotal.read_usage(name, run.id)),
        "newer": JobRun.select_newest_first(name).where(JobRun.id > run.id).order_by(JobRun.id).first(),
        "older": JobRun.select_newest_first(name).where(JobRun.id < run.id).first(),
    }


def _list_children(run: JobRun, instant: datetime) -> Iterator[ChildStory]:
    """Yield the run's children that are at work, have failed, or have deleted records."""
    named = set()
    for process in process_list.process_facts(Process.list_all(), instant):
        for work in process["at_work"]:
            if work["run"] == run.id and work["what"] != run.batch:
                holder = f"{process['host']}:{process['pid']}"
                where = TranslatableText("%(work)s on %(process)s", work=work["what"], process=holder)
                named.add(work["message_id"])
                yield ChildStory(work["message_id"], "started", work["since"], None, where)
    for row in (
        Quarantined.oldest_first(batch=run.batch, kind="child")
        .where(Quarantined.run == run.id)
        .limit(MAX_SHOWN_CHILDREN)
    ):
        named.add(row.key)
        yield ChildStory(row.key, "failing", row.since, row.failed_at, row.error, row.id)
    for one in lookup.list_children(run.id, limit=MAX_SHOWN_CHILDREN):
        if one.child not in {run.batch, *named}:
            counted = TranslatableText("rows in the audit: %(count)s", count=f"{one.rows:,}")
            yield ChildStory(one.child, "done", one.first, one.last, counted)
