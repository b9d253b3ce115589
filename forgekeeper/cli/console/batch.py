"""Page of a batch: its state, holds, ticks and limits, and a preview of its next run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forgekeeper.api.batches import BatchSpec
from forgekeeper.cli import process_list, running, status, ticks
from forgekeeper.cli.connection import batch_named
from forgekeeper.cli.console.declared import read_alert_rules
from forgekeeper.cli.console.pages import PageRequest, page
from forgekeeper.cli.console.texts import TranslatableText, describe_duration
from forgekeeper.cli.terminal import read_number, wrong_use
from forgekeeper.engine import previewing
from forgekeeper.guards import breaker
from forgekeeper.ledger.heartbeats import Process
from forgekeeper.ledger.holds import Batch
from forgekeeper.ledger.job_runs import OPEN_STATES, JobRun
from forgekeeper.ledger.limits import NO_AMOUNT, LimitUsage, RunTotal
from forgekeeper.platform.database import now
from forgekeeper.platform.settings import Settings

TICKS_PER_PAGE, TICKS_PER_CHART = 50, 60
"""Ticks per page, and ticks per chart."""
TICK_STATES = (*OPEN_STATES, "succeeded", "failed", "blocked", "skipped", "coalesced", "missed")


@page("/batches/{batch}", "batch.html", TranslatableText("%(batch)s"), query=("state", "before"))
def show_batch(request: PageRequest) -> dict[str, Any]:
    """Show a batch and its ticks, newest first, optionally of a ``state`` or ``before`` a run."""
    batch, settings, instant = batch_named(request.path["batch"]), request.settings, now()
    written, _whose = process_list.read_schedules(Process.list_all(), instant, settings)
    with status.TolerantReader() as looks:
        facts = status.batch_facts(batch, written[batch.name], instant, looks)
    return {
        "at": instant,
        "batch": batch,
        "one": facts,
        "notes": list(previewing.describe_restrictions(batch, settings)),
        "redis_trouble": looks.trouble,
        "charts": list(_chart_ticks(batch)),
        "limits": list_limits(settings, batch.name, RunTotal.read_usage(batch.name, breaker.NEXT_RUN)),
        "pace": settings.max_records_per_second(batch.name),
        "breaker": {
            "share": settings.breaker_share,
            "least": settings.breaker_least,
            "times": breaker.LARGEST_RUN_MULTIPLE,
            "largest": breaker.find_largest_run(batch.name),
        },
        "cursor": Batch.read_position(batch.name),
        "declared": (batch, *batch.children),
        "alerts": [rule for rule in read_alert_rules() if batch.name in rule["batches"]],
        **_list_ticks(request, batch.name),
    }


@page(
    "/batches/{batch}/preview", "preview.html", TranslatableText("Preview of %(batch)s"), timeout_seconds=12, live=False
)
def show_preview(request: PageRequest) -> dict[str, Any]:
    """Show a preview of the next run, like `run --dry-run`."""
    return running.require_preview(batch_named(request.path["batch"]), request.settings).as_json()


def list_limits(settings: Settings, batch: str, used: LimitUsage) -> list[tuple[str, int | None, int]]:
    """Return the name of each limit, its value (None if unlimited), and its current use."""
    names = (
        TranslatableText("records per run"),
        TranslatableText("records per day"),
        TranslatableText("bytes per run"),
        TranslatableText("bytes per day"),
    )
    return list(zip(names, settings.deletion_limits(batch), used[1:5], strict=True))


def _list_ticks(request: PageRequest, name: str) -> dict[str, Any]:
    """Return a page of the batch's ticks, and whether there are *more*."""
    state, before = request.query.get("state"), request.query.get("before")
    if state is not None and state not in TICK_STATES:
        states = ", ".join(TICK_STATES)
        wrong_use(
            TranslatableText("there is no state %(state)s; there are: %(states)s", state=repr(state), states=states)
        )
    number = None if before is None else read_number(before, "a run")
    runs = ticks.list_runs(name, limit=TICKS_PER_PAGE + 1, state=state, before=number)
    return {
        "states": TICK_STATES,
        "rows": [ticks.run_row(run) for run in runs[:TICKS_PER_PAGE]],
        "more": len(runs) > TICKS_PER_PAGE,
        "kept": {"state": state} if state else {},
    }


def _chart_ticks(batch: BatchSpec) -> Iterator[tuple[TranslatableText, list[tuple[JobRun, float, TranslatableText]]]]:
    """Yield charts of the last ticks, newest at the right: durations and deletions."""
    runs = ticks.list_runs(batch.name, limit=TICKS_PER_CHART)[::-1]
    ended = [(run, run.started_at and (run.finished_at or run.alive_at) - run.started_at) for run in runs]
    lasted = [
        (run, one.total_seconds(), describe_duration(one)) if one else (run, 0.0, TranslatableText("did not run"))
        for run, one in ended
    ]
    yield TranslatableText("Duration of the last ticks"), lasted
    if batch.deletes_records:
        totals = RunTotal.sum_of_runs(batch.name, [run.id for run in runs])
        deleted = [(run, totals.get(run.id, NO_AMOUNT).records) for run in runs]
        yield (
            TranslatableText("Records deleted by the last ticks"),
            [(run, one, TranslatableText("%(count)s deleted", count=f"{one:,}")) for run, one in deleted],
        )
