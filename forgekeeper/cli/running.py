"""`run` executes a batch here, `send` sends it to the workers, `cancel` ends a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Annotated, Any, NamedTuple

import typer
from rich.filesize import decimal

from forgekeeper.api.batches import BatchSpec
from forgekeeper.api.inspection import PreviewPart
from forgekeeper.audit import acts
from forgekeeper.cli.connection import batch_named, connect_command, require_installation, require_redis
from forgekeeper.cli.run_here import execute_run
from forgekeeper.cli.terminal import (
    HELD_STATUS,
    CompletedAct,
    Json,
    Problem,
    err,
    format_duration,
    format_facts,
    format_time,
    print_answer,
    print_sentences,
    show_progress_line,
    wrong_use,
)
from forgekeeper.delivery.messages import enqueue_run
from forgekeeper.engine.previewing import DEFAULT_SAMPLE_SIZE, BatchPreview, preview_batch
from forgekeeper.guards.preconditions import Blocked
from forgekeeper.ledger import holds, manual_runs, reconcile
from forgekeeper.ledger.holds import Hold
from forgekeeper.ledger.job_runs import JobRun, StartedRun
from forgekeeper.platform.connections import ServerTimeouts, process_identity
from forgekeeper.platform.database import database, now
from forgekeeper.platform.settings import Settings
from metrics.logs import clean_text

BATCH_HELP = "The batch's name; `forgekeeper status` lists them."
BatchName = Annotated[str, typer.Argument(metavar="BATCH", help=BATCH_HELP)]
BatchNames = Annotated[list[str] | None, typer.Argument(metavar="[BATCH...]", help=BATCH_HELP)]
OptionalReason = Annotated[str | None, typer.Option(help="The reason, for other people and the audit.")]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Change nothing: show the records that would be deleted, their size, projects and age, and kept records.",
    ),
]
Sample = Annotated[
    int | None,
    typer.Option(min=0, help="With --dry-run: number of records to name, by default 10.", show_default=False),
]


def run(batch: BatchName, dry_run: DryRun = False, sample: Sample = None, json: Json = False) -> None:
    """Run a batch in this process now, and print its result.

    It takes over a run that waits in the queue.  If the batch is paused, stopped, held or already running, it is
    skipped, and the result says so.  It takes over the run of a dead process that has been silent for
    FORGEKEEPER_DEAD_AFTER.  Exit status 3 if the batch is held or such a process has not been silent for long enough,
    or if the run or a child was blocked.  Ctrl-C stops between two chunks, a second Ctrl-C at once.

    With --dry-run nothing is changed and no run begins; paused and switched-off batches can be previewed, too.  A
    preview counts for ten seconds, and marks numbers that need longer as estimates.
    """
    chosen = batch_named(batch)
    if dry_run:
        _show_preview(chosen, DEFAULT_SAMPLE_SIZE if sample is None else sample, json=json)
        return
    if sample is not None:
        wrong_use("--sample needs --dry-run: a run names no records")
    silent = None
    with connect_command(f"run {batch}", reports_errors=True) as settings:
        require_installation()
        back = Hold.find_state(batch)
        started = None if back else _start_run(chosen, settings)
        if started is not None:
            result, run_id = execute_run(chosen, started, settings), started.id
        else:
            silent = None if back else _describe_silent_run(batch, settings)
            print_sentences(holds.describe_obstacles(batch) if back else [silent or _describe_open_run(batch)], err)
            result, run_id = asdict(chosen.outcome()) | {"skipped": back or "overlap"}, None
    print_answer({"run": run_id} | result, f"{batch}: {format_facts(result)}", json=json)
    if silent or _is_held(result):
        raise typer.Exit(HELD_STATUS)


def _show_preview(batch: BatchSpec, sample: int, *, json: bool) -> None:
    def show_progress(part: PreviewPart) -> None:
        show_progress_line(f"{batch.name}: {part.records:,} counted, {part.record}")

    with connect_command(f"preview {batch.name}") as settings:
        try:
            found = require_preview(batch, settings, sample=sample, on_part=show_progress)
        finally:
            show_progress_line("")
    print_answer(found.as_json(), "\n".join(map(clean_text, list_preview_lines(found))), json=json)


def _is_held(result: Mapping[str, Any]) -> bool:
    """Check whether the run or a child was blocked, or the batch is held."""
    children = result.get("children")
    attempts = [result, *(children if isinstance(children, list) else [])]
    return any("blocked" in one or one.get("skipped") == "held" for one in attempts)


def require_preview(batch: BatchSpec, settings: Settings, **options: Any) -> BatchPreview:
    """Return a preview; raise `Problem` if the batch would be blocked.

    *options* are passed to `preview`.
    """
    try:
        return preview_batch(batch, settings, **options)
    except Blocked as blocked:
        raise Problem(f"{batch.name} would be blocked: {blocked}", HELD_STATUS) from None


def _start_run(batch: BatchSpec, settings: Settings) -> StartedRun | None:
    """Start the batch's run in this process and record it.

    Returns None if a run is open or the batch is held. A run of a dead process is taken over here, as there may be no
    scheduler.
    """
    for lost in JobRun.reopen_lost(batch.name, dead_after=settings.dead_after):
        err.print(f"run {lost['id']} of {batch.name} was lost with {lost['worker']}, and is taken over")
    with database.atomic():
        waiting = JobRun.find_open(batch.name)
        started = JobRun.start_here(batch.name, by=process_identity())
        if started is not None:
            taken_over = waiting is not None and waiting.id == started.id
            before = {"state": waiting.state, "tick": waiting.tick} if waiting and taken_over else None
            after = {"run": started.id, "taken_over": taken_over}
            acts.record_act("run", f"run {started.id}", batch=batch.name, before=before, after=after)
    return started


def send(batch: BatchName, json: Json = False) -> None:
    """Send a batch to the workers now, unless it is queued or running already.

    Exit status 3 if it is held.
    """
    chosen = batch_named(batch)
    # The limits of a scheduler are short: a server that hangs must not delay the answer.
    with connect_command("send", limits=ServerTimeouts.for_scheduler):
        sent = send_batch(chosen)
    print_sentences(sent.obstacles, err)
    facts = {"batch": batch, "run": sent.run, "skipped": sent.skipped}
    if json or sent.run is not None:
        print_answer(
            facts, f"{batch} is queued as run {sent.run}; `forgekeeper why {batch}` shows its progress", json=json
        )
    if sent.skipped == "held":
        raise typer.Exit(HELD_STATUS)


class SendResult(NamedTuple):
    """The new *run* of the *batch*, or None with *skipped* (a word) and *obstacles*."""

    batch: str
    run: int | None
    skipped: str | None
    obstacles: list[str]

    def describe_changes(self) -> list[str]:
        """Return a sentence about the new run."""
        return [f"{self.batch} is queued as run {self.run}"] if self.run is not None else []

    def describe_refusals(self) -> list[str]:
        """Return the obstacles that prevented a run."""
        return self.obstacles


def send_batch(batch: BatchSpec) -> SendResult:
    """Send the batch to the workers and record it, unless it is held, queued or running.

    Needs a connection. Raises `Problem` if Redis belongs to another installation, and Redis' error if it is away.
    """
    require_redis()
    back = Hold.find_state(batch.name)
    number = None if back else manual_runs.claim_run(batch)
    obstacles = (
        [] if number is not None else holds.describe_obstacles(batch.name) if back else [_describe_open_run(batch.name)]
    )
    reconcile.send_open_run(batch.name, enqueue_run)
    return SendResult(batch.name, number, None if number else back or "overlap", obstacles)


def cancel(
    number: Annotated[
        int, typer.Argument(metavar="RUN", min=1, help="The run's number, as `forgekeeper ticks` shows it.")
    ],
    reason: OptionalReason = None,
    json: Json = False,
) -> None:
    """End a run and its children before their next chunk; a run that waits will not start.

    The next run of the batch does the remaining work.
    """
    with connect_command("cancel", redis_needed=False):
        run, state, done = cancel_run(number, reason=reason)
    facts = {"run": number, "batch": run.batch, "was": run.state, "state": state or run.state, "reason": reason}
    print_answer(facts, done.sentence, json=json)


def cancel_run(number: int, *, reason: str | None) -> tuple[JobRun, str | None, CompletedAct]:
    """Cancel a run and record it. Needs a connection.

    Returns the run before the act, its new state or None if it had ended, and a sentence. Raises `Problem` if the run
    is not in the ledger.
    """
    run = require_run(number)
    with database.atomic():
        state = manual_runs.cancel_run(number, reason=reason, by=acts.name_actor())
        before = {"state": run.state, "cancelled_at": run.cancelled_at}
        acts.record_act(
            "cancel", f"run:{number}", batch=run.batch, reason=reason, before=before, after={"state": state}
        )
    return run, state, CompletedAct(f"run {number} of {run.batch} {_describe_cancellation(run, state)}")


def _describe_cancellation(run: JobRun, state: str | None) -> str:
    """Describe the effect on the run; *state* None means that it had ended before."""
    if state == "skipped":
        return "waited, and will not run"
    if state == "started":
        return "ends before its next chunk, and so do its children"
    if run.cancelled_at is not None:
        return f"was already cancelled, at {format_time(run.cancelled_at)}"
    return f"had already ended ({run.state}); children that are still running end before their next chunk"


def require_run(number: int) -> JobRun:
    """Return the run with that number; raise `Problem` if it is not in the ledger."""
    run: JobRun | None = JobRun.get_or_none(id=number)
    if run is None:
        raise Problem(f"the ledger has no run {number}; `forgekeeper ticks BATCH` lists the runs of a batch")
    return run


def _describe_silent_run(batch: str, settings: Settings) -> str | None:
    """Return a hint when a silent process's run can be taken over; None if it has a heartbeat."""
    row, instant = JobRun.find_open(batch), now()
    if row is None or row.state != "started" or instant - row.alive_at < settings.dead_after / 2:
        return None
    left = format_duration(max(timedelta(0), row.alive_at + settings.dead_after - instant))
    since = format_duration(instant - row.alive_at)
    return f"run {row.id} of {batch} on {row.started_by} has been silent for {since}: try again in {left}"


def _describe_open_run(batch: str) -> str:
    """Describe the open run that prevents a new run."""
    row = JobRun.find_open(batch)
    if row is None:
        return f"{batch} was busy a moment ago; try again"
    if row.state == "started":
        return f"{batch} is running on {row.started_by} since {format_time(row.started_at)}; wait until it ends"
    return f"{batch} is queued already, since {format_time(row.claimed_at)}"


def list_preview_lines(found: BatchPreview) -> Iterator[str]:
    """Yield a preview as lines of text."""
    yield f"{found.batch}, if it ran at {format_time(found.now)} UTC; nothing has been changed:"
    yield from (f"  note: {note}" for note in found.notes)
    for part in found.parts:
        yield f"  {_part_headline(part)}"
        yield from (f"    {line}" for line in _part_details(part))
    if found.due is not None:
        yield f"  due in all: {found.due:,}"
    if found.due and found.is_held:
        yield f"  `forgekeeper release {found.batch} --expect {found.due} --reason ...` allows these, and no more"


def _part_headline(part: PreviewPart) -> str:
    about = "about " if part.estimate else ""
    said = f"{part.record} of {part.batch}: {about}{part.records:,} would be {part.verb}"
    return said + (f", {about}{decimal(part.bytes)}" if part.bytes is not None else "")


def _part_details(part: PreviewPart) -> Iterator[str]:
    if part.estimate:
        yield "an estimate: not all records were counted in time"
    if part.oldest is not None:
        yield f"due since {format_time(part.oldest)}"
    shown = part.as_json()
    if shown["projects"]:
        others = shown["other_projects"]
        rest = f", {others['projects']:,} others {others['records']:,}" if others["projects"] else ""
        yield "by project: " + ", ".join(f"{name} {count:,}" for name, count in shown["projects"].items()) + rest
    for reason, count in part.kept.items():
        number = "not counted in time" if count is None else f"{count:,} kept"
        yield f"{reason}: {number}"
    if part.sample:
        yield "for example " + ", ".join(f"{key} ({name})" if name else key for key, name in part.sample)
