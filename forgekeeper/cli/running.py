"""`run` a batch here and now, or `send` it to the workers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, NamedTuple

import typer

from forgekeeper.audit import acts
from forgekeeper.batches import BatchSpec
from forgekeeper.cli import previews
from forgekeeper.cli.connection import batch_named, connected, require_installation, require_redis
from forgekeeper.cli.console import HELD, Json, answer, emit, err, facts, moment, out, say, wrong_use
from forgekeeper.cli.run_here import perform
from forgekeeper.connections import Limits
from forgekeeper.database import database
from forgekeeper.delivery.sending import claim, deliver
from forgekeeper.runs import reconcile
from forgekeeper.runs.holds import BRAKES, Hold
from forgekeeper.runs.identity import identity
from forgekeeper.runs.ledger import JobRun, Started
from forgekeeper.runs.previewing import SAMPLE

BATCH = "The batch's name; `forgekeeper status` lists them."
Name = Annotated[str, typer.Argument(metavar="BATCH", help=BATCH)]
Names = Annotated[list[str] | None, typer.Argument(metavar="[BATCH...]", help=BATCH)]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Change nothing: show how many records would go, how much, whose and since when, what stays and why, and"
        " how long it would take.",
    ),
]
Sample = Annotated[
    int | None,
    typer.Option(min=0, help="With --dry-run: how many records to name, 10 unless said.", show_default=False),
]


def run(batch: Name, dry_run: DryRun = False, sample: Sample = None, json: Json = False) -> None:
    """Run a batch here and now, and print its result.

    A run that waits in the queue is taken over.  A batch that is paused, stopped, held or running
    already is skipped, and the result says so.  Exit status 3 if it is held, or if the run or a child of it was
    blocked.  Ctrl-C stops between two chunks, a second one at once.

    With --dry-run nothing is changed and no run begins; a batch that is paused or switched off can be previewed, too.
    A preview counts for ten seconds, and marks what it has not counted by then as an estimate.
    """
    chosen = batch_named(batch)
    if dry_run:
        with connected(f"preview {batch}") as settings:
            previews.answer_with(chosen, settings, sample=SAMPLE if sample is None else sample, json=json)
        return
    if sample is not None:
        wrong_use("--sample is for --dry-run: a run names no records")
    with connected(f"run {batch}") as settings:
        require_installation()
        back = held_back(chosen)
        started = None if back else _started(chosen)
        if started is not None:
            result, run_id = perform(chosen, started, settings), started.id
        else:
            reason, sentence = back or ("overlap", overlapping(chosen))
            say([sentence], err)
            result, run_id = asdict(chosen.outcome()) | {"skipped": reason}, None
    answer({"run": run_id} | result, f"{batch}: {facts(result)}", json=json)
    if _is_held_or_blocked(result):
        raise typer.Exit(HELD)


def _is_held_or_blocked(result: dict[str, Any]) -> bool:
    """Say whether the batch is held, or the run or a child of it was blocked."""
    children = result.get("children")
    every = [result, *children] if isinstance(children, list) else [result]
    return any("blocked" in one or one.get("skipped") == "held" for one in every)


def _started(batch: BatchSpec) -> Started | None:
    """Start the batch's run in this process, and record it; None when one runs or the batch is held back."""
    with database.atomic():
        waiting = JobRun.open(batch.name)
        started = JobRun.start_here(batch.name, by=identity())
        if started is not None:
            taken_over = waiting is not None and waiting.id == started.id
            before = {"state": waiting.state, "tick": waiting.tick} if waiting and taken_over else None
            after = {"run": started.id, "taken_over": taken_over}
            acts.record("run", f"run {started.id}", batch=batch.name, before=before, after=after)
    return started


def send(batch: Name, json: Json = False) -> None:
    """Send a batch to the workers now, unless it is queued or running already.

    Exit status 3 if it is held.
    """
    chosen = batch_named(batch)
    # A server that hangs must not delay the answer.
    with connected("send", limits=Limits.of_scheduler):
        require_redis()
        sent = send_by_hand(chosen)
    if sent.run is None:
        say([sent.sentence], err)
    if json:
        emit({"batch": batch, "run": sent.run, "skipped": sent.skipped})
    elif sent.run is not None:
        out.print(sent.sentence)
    if sent.skipped == "held":
        raise typer.Exit(HELD)


class Sent(NamedTuple):
    """What became of a request to send a run by hand, and the sentence about it."""

    run: int | None
    skipped: str | None
    sentence: str


def send_by_hand(batch: BatchSpec, *, recorded: bool = False) -> Sent:
    """Send a run by hand to the workers, unless the batch is held back or has a run open.

    The audit records it, unless it is *recorded* already as part of another act.
    """
    back = held_back(batch)
    run_id = None if back else claim(batch, recorded=recorded)
    if run_id is None and back is None:
        back = "overlap", overlapping(batch)
    reconcile.send(batch.name, deliver)
    if back:
        return Sent(None, *back)
    hint = f"`forgekeeper why {batch.name}` shows what becomes of it"
    return Sent(run_id, None, f"{batch.name} is queued as run {run_id}; {hint}")


def held_back(batch: BatchSpec) -> tuple[str, str] | None:
    """Say why no run of the batch may start, by a word and in a sentence; None when one may."""
    reason = Hold.why(batch.name)
    kinds = {"stopped": ("stop",), "held": BRAKES, "paused": ("pause",)}
    hold = next(iter(Hold.standing(*kinds[reason], batch=batch.name)), None) if reason else None
    if reason is None or hold is None:
        return None
    if reason == "held":
        return reason, f"{batch.name} is held since {moment(hold.since)}: {hold.reason}"
    because = f" ({hold.reason})" if hold.reason else ""
    return reason, f"{batch.name} is {reason} by {hold.by}{because}; `forgekeeper resume {batch.name}` ends that"


def overlapping(batch: BatchSpec) -> str:
    """Say which open run of the batch is in the way."""
    row = JobRun.open(batch.name)
    if row is None:
        return f"{batch.name} was busy a moment ago; try again"
    if row.state == "started":
        return f"{batch.name} is running on {row.started_by} since {moment(row.started_at)}; wait until it ends"
    return f"{batch.name} is queued already, since {moment(row.claimed_at)}"
