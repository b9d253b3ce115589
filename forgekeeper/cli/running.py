"""`run` a batch here and now, or `send` it to the workers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType
from typing import Annotated, Any, NamedTuple

import typer

from forgekeeper import shutdown
from forgekeeper.batches import BATCHES, BatchSpec
from forgekeeper.cli.completion import names_of
from forgekeeper.cli.connection import batch_named, connected, require_installation, require_redis
from forgekeeper.cli.console import Json, Problem, answer, emit, err, facts, moment, out
from forgekeeper.cli.failures import sentence
from forgekeeper.cli.interrupts import heard
from forgekeeper.connections import Limits
from forgekeeper.identity import identity
from forgekeeper.process.broker import broker
from forgekeeper.process.run_messages import RunMessages
from forgekeeper.runs import reconcile
from forgekeeper.runs.attempt import Attempt, Call
from forgekeeper.runs.batch import Batch as BatchRow
from forgekeeper.runs.child import Child
from forgekeeper.runs.ledger import JobRun, Started
from forgekeeper.runs.runner import Runner
from forgekeeper.settings import Settings
from metrics.redaction import clean, describe

CHECK = "`forgekeeper check"
Name = Annotated[
    str,
    typer.Argument(
        metavar="BATCH", help="The batch's name; `forgekeeper status` lists them.", autocompletion=names_of(BATCHES)
    ),
]


def run(batch: Name, json: Json = False) -> None:
    """Run a batch here and now, and print its result.

    A run that waits in the queue is taken over.  A batch that is paused or running
    already is skipped, and the result says so.  Ctrl-C stops between two chunks, a second one
    at once.
    """
    chosen = batch_named(batch)
    with connected(f"run {batch}", interrupted_within=None) as settings, heard(settings.shutdown_timeout):
        require_installation()
        pause = paused(chosen)
        started = None if pause else JobRun.start_here(chosen.name, by=identity())
        if started is not None:
            result, run_id = _perform(chosen, started, settings), started.id
        else:
            err.print(clean(pause or overlapping(chosen)))
            result, run_id = asdict(chosen.nothing) | {"skipped": "paused" if pause else "overlap"}, None
    answer({"run": run_id} | result, f"{batch}: {facts(result)}", json=json)


def send(batch: Name, json: Json = False) -> None:
    """Send a batch to the workers now, unless it is queued or running already."""
    chosen = batch_named(batch)
    # Whoever sends is not to be held up by a server that hangs.
    with connected("send", limits=Limits.of_scheduler):
        require_redis()
        sent = send_by_hand(chosen)
    if sent.run is None:
        err.print(clean(sent.sentence))
    if json:
        emit({"batch": batch, "run": sent.run, "skipped": sent.skipped})
    elif sent.run is not None:
        out.print(sent.sentence)


class Sent(NamedTuple):
    """What became of a wish for a run by hand, and the sentence about it."""

    run: int | None
    skipped: str | None
    sentence: str


def send_by_hand(batch: BatchSpec) -> Sent:
    """Send a run by hand to the workers, unless the batch is paused or has a run open."""
    sentence, skipped = paused(batch), "paused"
    run_id = None if sentence else JobRun.claim_manual(batch.name, by=identity())
    if run_id is None and sentence is None:
        sentence, skipped = overlapping(batch), "overlap"
    reconcile.send(batch.name, RunMessages(batch))
    if sentence:
        return Sent(None, skipped, sentence)
    hint = f"`forgekeeper why {batch.name}` tells what becomes of it"
    return Sent(run_id, None, f"{batch.name} is queued as run {run_id}; {hint}")


def _perform(batch: BatchSpec, started: Started, settings: Settings) -> dict[str, Any]:
    """Make the attempt in this process; return its result, raise `Problem` when it failed."""
    runner = Runner(settings)
    attempt = runner.begin(batch.name, started)
    attempt.children = []
    # A person is watching: a run of his ends here, a scheduled one that he took over does not.
    by_hand, error = started.tick is None, None
    try:
        with _stopping_politely(), _progress(batch, attempt):
            broker.get_actor(batch.name).fn()
    except Exception as raised:  # noqa: BLE001, whatever it is, it is the run's result
        error = raised
    state = runner.close(attempt, error, final=by_hand)
    runner.stop()
    if attempt.blocked is not None:
        err.print(clean(f"{batch.name} is blocked: {attempt.blocked}"), style="red")
    # What a run has sent before it failed is worked on, here as in a worker.
    children = _work_on(attempt.children, settings, run=attempt.run.id)
    if state in ("succeeded", "blocked"):
        return attempt.result() | children
    if state is None:
        raise Problem(f"{batch.name} was taken from this process: it gave no sign of life for too long")
    again = "" if by_hand else "; workers will try it again"
    raise Problem(f"{batch.name} failed: {_cause(error)}{again}") from error


def _cause(error: Exception | None) -> str:
    """Say what a run failed of, and once what to do about it."""
    if error is None:
        return "unknown"
    if said := sentence(error):
        return said
    said = describe(error)
    return said if CHECK in said else f"{said}; {CHECK}` looks for the cause"


def _work_on(calls: list[Call], settings: Settings, *, run: int) -> dict[str, Any]:
    """Work on the children of a run here, each until it is drained; return what they came to."""
    outcomes: list[dict[str, Any]] = []
    failures: list[str] = []
    for call in calls:
        more = not shutdown.requested.is_set()
        while more:
            child = Child(call.actor.actor_name, call.message_id, settings, run=run)
            child.enter()
            try:
                call.actor.fn(*call.args)
            except Exception as error:  # noqa: BLE001, whatever it is, the other children are none the worse
                child.leave(error)
                failures.append(f"{call.message_id}: {_cause(error)}")
                break
            child.leave(None)
            if child.blocked is not None:
                err.print(clean(f"{call.message_id} is blocked: {child.blocked}"), style="red")
            outcomes.append(child.result())
            more = child.more and not shutdown.requested.is_set()
    if failures:
        count = f"{len(failures)} of {len(calls)} children failed"
        raise Problem(f"{count}, the first {failures[0]}; workers will not try them again, the next run will")
    return {"children": outcomes} if calls else {}


def paused(batch: BatchSpec) -> str | None:
    """Say by whom the batch is paused, None when it is not."""
    row = BatchRow.paused(batch.name).first()
    if row is None:
        return None
    because = f" ({row.paused_reason})" if row.paused_reason else ""
    return f"{batch.name} is paused by {row.paused_by}{because}; `forgekeeper resume {batch.name}` ends that"


def overlapping(batch: BatchSpec) -> str:
    """Say which open run of the batch is in the way."""
    row = JobRun.open(batch.name)
    if row is None:
        return f"{batch.name} was busy a moment ago; try again"
    if row.state == "started":
        return f"{batch.name} is running on {row.started_by} since {moment(row.started_at)}; wait until it ends"
    return f"{batch.name} is queued already, since {moment(row.claimed_at)}"


@contextmanager
def _stopping_politely() -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM end the run at its next safe point, the second at once."""

    def received(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, before[number])
        shutdown.requested.set()

    before = {int(number): signal.signal(number, received) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress(batch: BatchSpec, attempt: Attempt) -> Iterator[None]:
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
