"""Runs in the ledger: `ticks` lists those of a batch, `why` says what became of one."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import typer

from forgekeeper.cli import story, times
from forgekeeper.cli.connection import batch_named, connected
from forgekeeper.cli.console import Json, emit, moment, say, table, wrong_use
from forgekeeper.cli.process_list import cron, schedules
from forgekeeper.cli.running import Name, numbered
from forgekeeper.database import now
from forgekeeper.runs import holds
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.processes import Process
from forgekeeper.runs.quarantine import Quarantined
from forgekeeper.settings import Settings


def ticks(
    batch: Name, limit: Annotated[int, typer.Option(min=1, help="How many, newest first.")] = 20, json: Json = False
) -> None:
    """List a batch's ticks and runs by hand, newest first."""
    name = batch_named(batch).name
    with connected("ticks"):
        runs = list(JobRun.of(name).limit(limit))
    if json:
        emit({"batch": name, "ticks": list(map(_facts, runs))})
        return
    columns = ("run", "tick", "state", "reason", "attempt", "started by", "ended", "error or result")
    table("", columns, map(_row, runs))


def why(
    batch: Annotated[str, typer.Argument(metavar="BATCH|RUN", help="A batch's name, or a run's number.")],
    time: Annotated[
        str | None,
        typer.Argument(
            metavar="[TIME]", help="A tick, in UTC, such as 18:29 or 2026-11-20T18:29; the newest if absent."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Say what became of one tick: which worker ran it and with what result, or why it never ran.

    It also says what holds the batch back at this moment, and how many of its children fail.  A time of day is the last
    one that has passed.
    """
    number = int(batch) if batch.isascii() and batch.isdigit() and len(batch) < 19 else None
    if number is not None and time is not None:
        wrong_use(f"run {number} has one tick only: leave the time out, or name a batch")
    name = "" if number is not None else batch_named(batch).name
    with connected("why", redis_needed=False) as settings:
        tick = None if time is None else times.read(time, now(), ahead=False)
        if number is not None:
            run: JobRun | None = numbered(number)
        elif tick is None:
            run = JobRun.of(name).first()
        else:
            run = JobRun.at(name, tick)
        name = name or (run.batch if run else "")
        sentences = _absent(name, tick, settings) if run is None else list(story.tell(run))
        failing = Quarantined.oldest_first(batch=name, kind="child").count()
        sentences += [*holds.sentences(name), *story.of_children(name, failing)]
    if json:
        emit({"batch": name, "run": run and _facts(run), "children_failing": failing, "story": sentences})
    else:
        say(sentences)


def _absent(name: str, tick: datetime | None, settings: Settings) -> list[str]:
    if tick is None:
        return ["The batch has not been due yet since it was registered, and nobody has sent it."]
    written, _whose = schedules(Process.known(), now(), settings)
    return story.tell_absent(tick, cron(written[name]))


def _facts(run: JobRun) -> dict[str, Any]:
    return {**run.__data__, "result": story.result_of(run)}


def _row(run: JobRun) -> tuple[object, ...]:
    aside = story.set_aside(run)
    tick = moment(run.tick) if run.tick else "by hand" if aside is None else f"{aside} (set aside)"
    return run.id, tick, run.state, run.reason, run.attempt, run.started_by, run.finished_at, story.outcome(run)
