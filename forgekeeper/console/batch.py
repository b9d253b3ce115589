"""One batch: what it does and what holds it, its ticks, what limits it; and what a run of it would do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from forgekeeper.batches import BatchSpec
from forgekeeper.cli import process_list, status, ticks
from forgekeeper.cli.connection import batch_named
from forgekeeper.cli.terminal import lasting, moment, wrong_use
from forgekeeper.console.declared import rules
from forgekeeper.console.drawing import columns
from forgekeeper.console.pages import Asked, page
from forgekeeper.database import now
from forgekeeper.runs import breaker, previewing
from forgekeeper.runs.holds import Batch
from forgekeeper.runs.ledger import OPEN, JobRun
from forgekeeper.runs.processes import Process
from forgekeeper.runs.totals import RunTotal, Used
from forgekeeper.settings import Settings

SIZE, DRAWN = 50, 60
"""So many ticks are on a page, and in a chart."""
STATES = (*OPEN, "succeeded", "failed", "blocked", "skipped", "coalesced", "missed")


@page("/batches/{batch}", "batch.html", "{batch}")
def one_batch(asked: Asked) -> dict[str, Any]:
    """Show what is known of a batch, and its ticks, newest first: of a ``state``, and ``before`` a run's number."""
    batch, settings, instant = batch_named(asked.path["batch"]), asked.settings, now()
    written, _whose = process_list.schedules(Process.known(), instant, settings)
    with status.Looks() as looks:
        facts = status.batch_facts(batch, written[batch.name], instant, looks)
    return {
        "at": instant,
        "batch": batch,
        "one": facts,
        "notes": list(previewing.states(batch, settings)),
        "warnings": [*([looks.trouble] if looks.trouble else [])],
        "charts": _charts(batch),
        "limits": limits(settings, batch.name, RunTotal.used(batch.name, breaker.NEXT), of_run=False),
        "pace": settings.pace(batch.name),
        "breaker": {
            "share": settings.breaker_share,
            "least": settings.breaker_least,
            "times": breaker.TIMES,
            "largest": breaker.largest_run(batch.name),
        },
        "cursor": Batch.position(batch.name),
        "declared": (batch, *batch.children),
        "alerts": [rule for rule in rules() if batch.name in rule.batches],
        **_ticks(asked, batch.name),
    }


@page("/batches/{batch}/preview", "preview.html", "Preview of {batch}", patience=12, live=False)
def preview(asked: Asked) -> dict[str, Any]:
    """Show what a run would do, as `run --dry-run` says it."""
    return previewing.preview(batch_named(asked.path["batch"]), asked.settings).as_json()


def number_named(text: str, of: str) -> int:
    """Read the number of something; refuse what is none."""
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        wrong_use(f"{text!r} is no number of a {of}")
    return int(text)


def limits(settings: Settings, batch: str, used: Used, *, of_run: bool) -> list[tuple[str, int | None, int | None]]:
    """Say each limit of the batch: what it limits, how much, and how much of it is used; None: not by this."""
    per_run, per_day, bytes_per_run, bytes_per_day = settings.limits(batch)
    return [
        ("records a run", per_run, used.run if of_run else None),
        ("records a day", per_day, used.day),
        ("bytes a run", bytes_per_run, used.run_bytes if of_run else None),
        ("bytes a day", bytes_per_day, used.day_bytes),
    ]


def _ticks(asked: Asked, name: str) -> dict[str, Any]:
    """Return a page of the batch's ticks, and where the next one begins."""
    state = asked.query.get("state")
    if state is not None and state not in STATES:
        wrong_use(f"there is no state {state!r}; there are: {', '.join(STATES)}")
    before = asked.query.get("before")
    number = None if before is None else number_named(before, "run")
    runs = ticks.listed(name, limit=SIZE + 1, state=state, before=number)
    kept = {} if state is None else {"state": state}
    return {
        "states": STATES,
        "rows": [ticks.row_of(run) for run in runs[:SIZE]],
        "older": kept | {"before": runs[SIZE - 1].id} if len(runs) > SIZE else None,
        "newest": kept,
    }


def _charts(batch: BatchSpec) -> list[tuple[str, Markup]]:
    """Draw how long the last ticks took, the newest at the right, and how much each has deleted."""
    runs = ticks.listed(batch.name, limit=DRAWN)[::-1]
    took = [(run.finished_at or run.alive_at) - run.started_at if run.started_at else None for run in runs]
    lasted = [max(0.0, one.total_seconds()) if one else 0.0 for one in took]
    said = [
        f"{_named(run)}: {'did not run' if one is None else lasting(one)}" for run, one in zip(runs, took, strict=True)
    ]
    drawn = [_chart("How long the last ticks took", runs, lasted, said)]
    if batch.deletes:
        totals = RunTotal.of_runs(batch.name, [run.id for run in runs])
        deleted = [totals[run.id].records if run.id in totals else 0 for run in runs]
        said = [f"{_named(run)}: {count:,} deleted" for run, count in zip(runs, deleted, strict=True)]
        drawn.append(_chart("How many records the last ticks deleted", runs, deleted, said))
    return drawn if runs else []


def _chart(title: str, runs: Sequence[JobRun], values: Sequence[float], labels: list[str]) -> tuple[str, Markup]:
    links, states = [f"/runs/{run.id}" for run in runs], [run.state for run in runs]
    most = labels[max(range(len(values)), key=values.__getitem__)] if runs else ""
    title = f"{title}, the newest at the right; the most was {most}"
    return title, columns(values, title, labels, links, states)


def _named(run: JobRun) -> str:
    tick = f"tick of {moment(run.tick)}" if run.tick else "by hand"
    return f"run {run.id}, {tick}, {run.state}"
