"""Page of a batch: its state, holds, ticks and limits, and a preview of its next run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forgekeeper.api.batches import BatchSpec
from forgekeeper.cli import process_list, running, status, ticks
from forgekeeper.cli.connection import batch_named
from forgekeeper.cli.console.declared import rules
from forgekeeper.cli.console.pages import Asked, page
from forgekeeper.cli.terminal import lasting, read_number, wrong_use
from forgekeeper.engine import previewing
from forgekeeper.guards import breaker
from forgekeeper.ledger.holds import Batch
from forgekeeper.ledger.job_runs import OPEN, JobRun
from forgekeeper.ledger.processes import Process
from forgekeeper.ledger.totals import NONE, RunTotal, Used
from forgekeeper.platform.database import now
from forgekeeper.platform.settings import Settings

SIZE, DRAWN = 50, 60
"""Ticks per page, and ticks per chart."""
STATES = (*OPEN, "succeeded", "failed", "blocked", "skipped", "coalesced", "missed")


@page("/batches/{batch}", "batch.html", "{batch}", query=("state", "before"))
def one_batch(asked: Asked) -> dict[str, Any]:
    """Show a batch and its ticks, newest first, optionally of a ``state`` or ``before`` a run."""
    batch, settings, instant = batch_named(asked.path["batch"]), asked.settings, now()
    written, _whose = process_list.schedules(Process.known(), instant, settings)
    with status.Looks() as looks:
        facts = status.batch_facts(batch, written[batch.name], instant, looks)
    return {
        "at": instant,
        "batch": batch,
        "one": facts,
        "notes": list(previewing.states(batch, settings)),
        "redis_trouble": looks.trouble,
        "charts": list(_charts(batch)),
        "limits": limits(settings, batch.name, RunTotal.used(batch.name, breaker.NEXT)),
        "pace": settings.pace(batch.name),
        "breaker": {
            "share": settings.breaker_share,
            "least": settings.breaker_least,
            "times": breaker.TIMES,
            "largest": breaker.largest_run(batch.name),
        },
        "cursor": Batch.position(batch.name),
        "declared": (batch, *batch.children),
        "alerts": [rule for rule in rules() if batch.name in rule["batches"]],
        **_ticks(asked, batch.name),
    }


@page("/batches/{batch}/preview", "preview.html", "Preview of {batch}", patience=12, live=False)
def preview(asked: Asked) -> dict[str, Any]:
    """Show a preview of the next run, like `run --dry-run`."""
    return running.preview_of(batch_named(asked.path["batch"]), asked.settings).as_json()


def limits(settings: Settings, batch: str, used: Used) -> list[tuple[str, int | None, int]]:
    """Return the name of each limit, its value (None if unlimited), and its current use."""
    names = ("records a run", "records a day", "bytes a run", "bytes a day")
    return list(zip(names, settings.limits(batch), used[1:5], strict=True))


def _ticks(asked: Asked, name: str) -> dict[str, Any]:
    """Return a page of the batch's ticks, and whether there are *more*."""
    state, before = asked.query.get("state"), asked.query.get("before")
    if state is not None and state not in STATES:
        wrong_use(f"there is no state {state!r}; there are: {', '.join(STATES)}")
    number = None if before is None else read_number(before, "a run")
    runs = ticks.listed(name, limit=SIZE + 1, state=state, before=number)
    return {
        "states": STATES,
        "rows": [ticks.row_of(run) for run in runs[:SIZE]],
        "more": len(runs) > SIZE,
        "kept": {"state": state} if state else {},
    }


def _charts(batch: BatchSpec) -> Iterator[tuple[str, list[tuple[JobRun, float, str]]]]:
    """Yield charts of the last ticks, newest at the right: durations and deletions."""
    runs = ticks.listed(batch.name, limit=DRAWN)[::-1]
    ended = [(run, run.started_at and (run.finished_at or run.alive_at) - run.started_at) for run in runs]
    lasted = [(run, one.total_seconds(), lasting(one)) if one else (run, 0.0, "did not run") for run, one in ended]
    yield "How long the last ticks took", lasted
    if batch.deletes:
        totals = RunTotal.of_runs(batch.name, [run.id for run in runs])
        deleted = [(run, totals.get(run.id, NONE).records) for run in runs]
        yield "How many records the last ticks deleted", [(run, one, f"{one:,} deleted") for run, one in deleted]
