"""Look into the ledger: `ticks`, `why`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from forgekeeper.batches import BATCHES
from forgekeeper.cli import audit, children, story, times, without_redis
from forgekeeper.cli.completion import names_of
from forgekeeper.cli.connection import batch_named, connected
from forgekeeper.cli.console import Json, Problem, emit, fill, grid, moment, out, wrong_use
from forgekeeper.cli.fitting import fits
from forgekeeper.cli.running import Name
from forgekeeper.cli.timetable import Timetable
from forgekeeper.database import now
from forgekeeper.process.rows import Process
from forgekeeper.runs import clock_ahead
from forgekeeper.runs.holds import Hold
from forgekeeper.runs.ledger import JobRun
from metrics.redaction import clean


def ticks(
    batch: Name, limit: Annotated[int, typer.Option(min=1, help="How many, newest first.")] = 20, json: Json = False
) -> None:
    """List a batch's ticks and runs by hand, newest first."""
    name = batch_named(batch).name
    with connected("ticks"):
        runs = list(JobRun.of(name).limit(limit))
    if json:
        emit({"batch": name, "ticks": [run.__data__ | {"result": story.result_of(run)} for run in runs]})
        return
    out.print(_drawn(runs), soft_wrap=False)


def why(
    batch: Annotated[
        str,
        typer.Argument(
            metavar="BATCH|RUN", help="A batch's name, or a run's number.", autocompletion=names_of(BATCHES)
        ),
    ],
    time: Annotated[
        str | None,
        typer.Argument(
            metavar="[TIME]", help="A tick, in UTC, such as 18:29 or 2026-11-20T18:29; the newest if absent."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Tell the story of one tick: who ran it and what came of it, or why it never ran.

    That includes the children that it sent: how many run, wait, have ended, and which fail.  A run's number tells the
    story of that run, whatever its batch.  A time of day is the last one that has passed.
    """
    number = _run_number(batch)
    if number is not None and time is not None:
        wrong_use(f"run {number} has one tick only: leave the time out, or name a batch")
    name = None if number is not None else batch_named(batch).name
    asked = None if time is None else _past(time)
    sent: list[dict[str, Any]] = []
    with connected("why", limits=without_redis.limits) as settings, without_redis.looks() as redis:
        tick = asked and asked(now())
        run: JobRun | None
        if name is None:
            run = JobRun.get_or_none(id=number)
            if run is None:
                raise Problem(f"the ledger has no run {number}; `forgekeeper ticks BATCH` lists those that it has")
            name = run.batch
        else:
            run = (JobRun.at(name, tick) or clock_ahead.set_aside(name, tick)) if tick else JobRun.of(name).first()
        if run is not None:
            sentences = story.tell(run, Hold.standing(batch=name)) + story.untimely(run, clock_ahead.ahead(name))
            sent = children.of(run, Process.known(), now(), redis)
            sentences += [*children.sentences(sent), *redis.warnings(), *audit.hint(run.id)]
        elif tick is not None:
            timetable = Timetable.of(Process.known(), now(), settings)
            sentences = story.tell_absent(tick, timetable.cron(name, tick), JobRun.oldest_tick(name))
        else:
            sentences = ["The batch has not been due yet since it was registered, and nobody has sent it."]
        if number is None and tick is None:
            sentences += children.others(BATCHES[name], run)
    if json:
        emit(
            {
                "batch": name,
                "run": run and run.__data__ | {"result": story.result_of(run)},
                "children": sent,
                "story": sentences,
            }
        )
    else:
        out.print("\n".join(map(clean, sentences)))


def _drawn(runs: Sequence[JobRun]) -> RenderableType:
    """Draw a table, or lines where it does not fit into its terminal."""
    columns = ("run", "tick", "state", "reason", "attempt", "started by", "ended", "error or result")
    drawn = grid(*columns, folded=("tick", "reason", "ended", columns[-1]))
    for run in runs:
        ended = moment(run.finished_at) if run.finished_at else ""
        facts = str(run.id), _tick(run), run.state, run.reason or "", str(run.attempt), run.started_by or "", ended
        fill(drawn, *facts, story.outcome(run))
    return drawn if fits(drawn, out.width) else Group(*map(_lines, runs))


def _lines(run: JobRun) -> Text:
    parts = [f"run {run.id}, {_tick(run)}: {run.state}{f' ({run.reason})' if run.reason else ''}"]
    parts += [f"attempt {run.attempt} by {run.started_by}"] if run.started_by else []
    parts += [f"ended {moment(run.finished_at)}"] if run.finished_at else []
    outcome = story.outcome(run)
    return Text(clean(", ".join(parts)) + (f"\n  {clean(outcome)}" if outcome else ""))


def _tick(run: JobRun) -> str:
    aside = story.set_aside(run)
    if aside is not None:
        return f"{moment(aside)} (set aside)"
    return moment(run.tick) if run.tick else "by hand"


def _run_number(text: str) -> int | None:
    """Return the number of a run, None when *text* is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _past(text: str) -> times.FromNow:
    try:
        return times.past(text)
    except times.NoTime as error:
        wrong_use(str(error))
