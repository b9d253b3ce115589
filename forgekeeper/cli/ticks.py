"""Runs in the ledger: `ticks` lists those of a batch, `why` says what became of one."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import typer

from forgekeeper.batches import BATCHES
from forgekeeper.cli import audit, children, story, times, without_redis
from forgekeeper.cli.connection import batch_named, connected
from forgekeeper.cli.console import Json, Problem, emit, moment, say, table, wrong_use
from forgekeeper.cli.running import Name
from forgekeeper.cli.timetable import Timetable
from forgekeeper.database import now
from forgekeeper.runs import clock_ahead
from forgekeeper.runs.holds import Hold
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.processes import Process
from forgekeeper.settings import Settings


def ticks(
    batch: Name, limit: Annotated[int, typer.Option(min=1, help="How many, newest first.")] = 20, json: Json = False
) -> None:
    """List a batch's ticks and runs by hand, newest first."""
    name = batch_named(batch).name
    with connected("ticks"):
        runs = list(JobRun.of(name).limit(limit))
    if json:
        emit({"batch": name, "ticks": [_facts(run) for run in runs]})
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

    That includes the children that it sent: how many run, wait, have ended, and which fail.  A time of day is the last
    one that has passed.
    """
    number = int(batch) if batch.isascii() and batch.isdigit() and len(batch) < 19 else None
    if number is not None and time is not None:
        wrong_use(f"run {number} has one tick only: leave the time out, or name a batch")
    name = None if number is not None else batch_named(batch).name
    when = None if time is None else times.past(time)
    with connected("why", limits=without_redis.limits) as settings, without_redis.looks() as redis:
        tick = when and when(now())
        run = _by_number(number) if number is not None else _of_batch(str(name), tick)
        name = name or (run and run.batch) or ""
        sent: list[dict[str, Any]] = []
        if run is not None:
            sentences = story.tell(run, Hold.standing(batch=name)) + story.untimely(run, clock_ahead.ahead(name))
            sent = children.of(run, Process.known(), now(), redis)
            sentences += [*children.sentences(sent), *redis.warnings(), *audit.hint(run.id)]
        else:
            sentences = _absent(name, tick, settings)
        if number is None and tick is None:
            sentences += children.others(BATCHES[name], run)
    if json:
        emit({"batch": name, "run": run and _facts(run), "children": sent, "story": sentences})
    else:
        say(sentences)


def _by_number(number: int) -> JobRun:
    run: JobRun | None = JobRun.get_or_none(id=number)
    if run is None:
        raise Problem(f"the ledger has no run {number}; `forgekeeper ticks BATCH` lists those that it has")
    return run


def _of_batch(name: str, tick: datetime | None) -> JobRun | None:
    if tick is None:
        newest: JobRun | None = JobRun.of(name).first()
        return newest
    return JobRun.at(name, tick) or clock_ahead.set_aside(name, tick)


def _absent(name: str, tick: datetime | None, settings: Settings) -> list[str]:
    if tick is None:
        return ["The batch has not been due yet since it was registered, and nobody has sent it."]
    timetable = Timetable.of(Process.known(), now(), settings)
    return story.tell_absent(tick, timetable.cron(name, tick), JobRun.oldest_tick(name))


def _facts(run: JobRun) -> dict[str, Any]:
    return {**run.__data__, "result": story.result_of(run)}


def _row(run: JobRun) -> tuple[object, ...]:
    aside = story.set_aside(run)
    tick = moment(run.tick) if run.tick else "by hand" if aside is None else f"{moment(aside)} (set aside)"
    return run.id, tick, run.state, run.reason, run.attempt, run.started_by, run.finished_at, story.outcome(run)
