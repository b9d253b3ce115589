"""`run` a batch here and now, or `send` it to the workers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType
from typing import Annotated, Any

import typer

import scheduler
from cli.connection import batch_named, connected, require_redis
from cli.console import Json, Problem, emit, err, facts, moment, out
from models import Batch as BatchRow
from models import JobRun, Started
from settings import Settings
from workers import Batch
from workers.attempt import Attempt, Call, describe, identity
from workers.child import Child
from workers.deadline import stopping
from workers.runner import Runner

Name = Annotated[str, typer.Argument(metavar="BATCH", help="The batch's name; `forgekeeper status` lists them.")]


def run(batch: Name, json: Json = False) -> None:
    """Run a batch here and now, and print its result.

    A run that waits in the queue is taken over.  A batch that is paused or running
    already is skipped, and the result says so.  Ctrl-C stops between two chunks.
    """
    chosen = batch_named(batch)
    with connected(f"run {batch}") as settings:
        reason = _paused(chosen)
        started = None if reason else JobRun.start_here(chosen.name, by=identity())
        if started is not None:
            result = _perform(chosen, started, settings)
        else:
            result = asdict(chosen.nothing) | {"skipped": reason or _overlapping(chosen)}
    if json:
        emit(result)
    else:
        out.print(f"{batch}: {facts(result)}")


def send(batch: Name, json: Json = False) -> None:
    """Send a batch to the workers now, unless it is queued or running already."""
    chosen = batch_named(batch)
    with connected("send"):
        require_redis()
        reason = _paused(chosen)
        run_id = None if reason else JobRun.claim_manual(chosen.name, by=identity())
        if run_id is None:
            reason = reason or _overlapping(chosen)
        scheduler.send(chosen)
    if json:
        emit({"batch": batch, "run": run_id, "skipped": reason})
    elif run_id is not None:
        out.print(f"{batch} is queued as run {run_id}; `forgekeeper why {batch}` tells what becomes of it")


def _perform(batch: Batch, started: Started, settings: Settings) -> dict[str, Any]:
    """Make the attempt in this process; return its result, raise `Problem` when it failed."""
    runner = Runner(settings)
    attempt = runner.begin(batch.name, started)
    attempt.children = []
    # A person is watching: a run of his ends here, a scheduled one that he took over does not.
    by_hand, error = started.tick is None, None
    try:
        with _stopping_politely(), _progress(batch, attempt):
            batch.actor.fn()
    except Exception as raised:  # noqa: BLE001, whatever it is, it is the run's result
        error = raised
    state = runner.close(attempt, error, final=by_hand)
    runner.stop()
    if state == "succeeded":
        return attempt.result() | _work_on(attempt.children or [], settings)
    if state is None:
        raise Problem(f"{batch.name} was taken from this process: it gave no sign of life for too long")
    hint = "`forgekeeper check` looks for the cause" if by_hand else "workers will try it again"
    raise Problem(f"{batch.name} failed: {describe(error) if error else 'unknown'}; {hint}") from error


def _work_on(calls: list[Call], settings: Settings) -> dict[str, Any]:
    """Work on the children of a run here, each until it is drained; return what they came to."""
    outcomes: list[dict[str, Any]] = []
    for call in calls:
        more = not stopping.is_set()
        while more:
            child = Child(call.actor.actor_name, call.message_id, settings)
            child.enter()
            try:
                call.actor.fn(*call.args)
            except Exception as error:
                child.leave(error)
                raise Problem(f"{call.message_id} failed: {describe(error)}; workers will not try it again") from error
            child.leave(None)
            outcomes.append(asdict(child.outcome))
            more = child.more and not stopping.is_set()
    return {"children": outcomes} if calls else {}


def _paused(batch: Batch) -> str | None:
    row = BatchRow.paused(batch.name).first()
    if row is None:
        return None
    because = f" ({row.paused_reason})" if row.paused_reason else ""
    err.print(f"{batch.name} is paused by {row.paused_by}{because}; `forgekeeper resume {batch.name}` ends that")
    return "paused"


def _overlapping(batch: Batch) -> str:
    row = JobRun.open(batch.name)
    if row is None:
        err.print(f"{batch.name} was busy a moment ago; try again")
    elif row.state == "started":
        err.print(f"{batch.name} is running on {row.started_by} since {moment(row.started_at)}; wait until it ends")
    else:
        err.print(f"{batch.name} is queued already, since {moment(row.claimed_at)}")
    return "overlap"


@contextmanager
def _stopping_politely() -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM end the run at its next safe point, the second at once."""

    def received(number: int, _frame: FrameType | None) -> None:
        stopping.set()
        signal.signal(number, before[number])

    before = {int(number): signal.signal(number, received) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress(batch: Batch, attempt: Attempt) -> Iterator[None]:
    """Show on a terminal how far the run has got."""
    ended = threading.Event()

    def show() -> None:
        with err.status(batch.name) as status:
            while not ended.wait(0.2):
                done = attempt.budget.done if attempt.budget else 0
                status.update(f"{batch.name}: {done:,} done")

    shower = threading.Thread(target=show, daemon=True)
    if err.is_terminal:
        shower.start()
    try:
        yield
    finally:
        ended.set()
        if shower.ident:
            shower.join()
