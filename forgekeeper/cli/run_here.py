"""A run in the command's own process: the attempt of a worker, and its children."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

from forgekeeper.api.answers import Enqueued, Keyed
from forgekeeper.api.batches import BatchSpec, ChildSpec
from forgekeeper.cli.connection import sentence
from forgekeeper.cli.terminal import Problem, err, progress, say
from forgekeeper.engine.attempt import Attempt, Runner
from forgekeeper.ledger.job_runs import Started
from forgekeeper.platform import shutdown
from forgekeeper.platform.lifetime import end_programs
from forgekeeper.platform.settings import Settings
from metrics.logs import describe
from metrics.threads import Thread

CHECK = "`forgekeeper check"


def perform(batch: BatchSpec, started: Started, settings: Settings) -> dict[str, Any]:
    """Execute the attempt in this process; return its result or raise `Problem` if it failed."""
    children: list[tuple[ChildSpec, Keyed]] = []

    def collect(_run: int, child: ChildSpec, keyed_args: Sequence[Keyed]) -> Enqueued:
        children.extend((child, one) for one in keyed_args)
        return Enqueued(len(keyed_args))

    runner = Runner(settings, collect)
    # A manual run is not retried; workers retry a scheduled run that was taken over.
    by_hand = started.tick is None
    with _stopping_politely(settings.shutdown_timeout):
        with runner.attempt(batch, started, final=by_hand) as attempt, _progress(attempt):
            attempt.work()
        runner.stop()
        if attempt.blocked is not None:
            say([f"{batch.name} is blocked: {attempt.blocked}"], err)
        # As in a worker, children sent before a failure are executed.
        results = _work_on(children, runner, run=started.id)
    if attempt.held is not None:
        say([f"{batch.name} is held: {attempt.held}"], err)
    if attempt.state in ("succeeded", "blocked", "skipped"):
        return attempt.result() | results
    if attempt.state is None:
        raise Problem(f"{batch.name} was taken from this process: its heartbeat was missing for too long")
    retry = "" if by_hand else "; workers will try it again"
    raise Problem(f"{batch.name} failed: {_cause(attempt.error)}{retry}") from attempt.error


def _cause(error: BaseException | None) -> str:
    """Describe the cause of a failure and its remedy."""
    if error is None:
        return "unknown"
    said = describe(error)
    return sentence(error) or (said if CHECK in said else f"{said}; {CHECK}` looks for the cause")


def _work_on(calls: list[tuple[ChildSpec, Keyed]], runner: Runner, *, run: int) -> dict[str, Any]:
    """Execute the children of a run in this process until drained; return their results."""
    outcomes: list[dict[str, Any]] = []
    failures: list[str] = []
    for child, (key, args) in calls:
        more = not shutdown.requested.is_set()
        while more:
            with runner.child(child, key, run=run) as attempt:
                attempt.work(*args)
            if attempt.error is not None:
                failures.append(f"{key}: {_cause(attempt.error)}")
                break
            if attempt.blocked is not None:
                say([f"{key} is blocked: {attempt.blocked}"], err)
            outcomes.append(attempt.result())
            more = attempt.wants_successor and not shutdown.requested.is_set()
    if failures:
        count = f"{len(failures)} of {len(calls)} children failed"
        raise Problem(f"{count}, the first {failures[0]}; workers will not try them again, the next run will")
    return {"children": outcomes} if calls else {}


@contextmanager
def _stopping_politely(within: timedelta) -> Iterator[None]:
    """Stop the run at its next safe point after Ctrl-C or SIGTERM.

    A second signal, or the end of the time *within*, ends the process at once. A thread listens for signals, because
    Python calls no handler while libpq waits for a server that hangs.
    """
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    wakeup = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    Thread(partial(_listen, reading, within.total_seconds()), "signals").start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        writing.close()  # ends the listener


def _listen(reading: socket.socket, within: float) -> None:
    with reading:
        first = reading.recv(1)
        if not first:
            return
        shutdown.requested.set()
        reading.settimeout(within)
        with suppress(TimeoutError):
            if not reading.recv(1):
                return
    err.print("forgekeeper: interrupted before the run came to a safe point", style="red")
    end_programs()
    os._exit(128 + first[0])


@contextmanager
def _progress(attempt: Attempt) -> Iterator[None]:
    """Show the number of deleted records on a terminal during the run."""
    ended, name = threading.Event(), attempt.declared.name

    def show() -> None:
        while not ended.wait(0.5):
            progress(f"{name}: {attempt.run.deadline.done:,} done")

    shower = Thread(show, "progress")
    if err.is_terminal:
        shower.start()
    try:
        yield
    finally:
        ended.set()
        if shower.ident:
            shower.join()
            progress("")
