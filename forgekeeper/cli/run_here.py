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

from forgekeeper.api.answers import EnqueueCounts, KeyedArguments
from forgekeeper.api.batches import BatchSpec, ChildSpec
from forgekeeper.cli.connection import describe_with_remedy
from forgekeeper.cli.terminal import Problem, err, print_sentences, show_progress_line
from forgekeeper.engine.attempt import Attempt, Runner
from forgekeeper.engine.message_attempt import execute_message
from forgekeeper.ledger.job_runs import StartedRun
from forgekeeper.platform import shutdown
from forgekeeper.platform.database.arrays import split_into_parts
from forgekeeper.platform.settings import Settings
from forgekeeper.platform.worker_shutdown import terminate_git_processes
from metrics.logs import describe_error
from metrics.threads import DaemonThread

CHECK_COMMAND = "`forgekeeper check"


def execute_run(batch: BatchSpec, started: StartedRun, settings: Settings) -> dict[str, Any]:
    """Execute the attempt in this process; return its result or raise `Problem` if it failed."""
    messages: list[tuple[ChildSpec, list[KeyedArguments]]] = []

    def collect_children(
        _run: int, child: ChildSpec, calls: Sequence[KeyedArguments], *, per_message: int = 1
    ) -> EnqueueCounts:
        messages.extend((child, some) for some in split_into_parts(calls, per_message))
        return EnqueueCounts(len(calls))

    runner = Runner(settings, collect_children)
    # A manual run is not retried; workers retry a scheduled run that was taken over.
    by_hand = started.tick is None
    with _stop_at_safe_point(settings.shutdown_timeout):
        with runner.create_attempt(batch, started, final=by_hand) as attempt, _show_progress(attempt):
            attempt.work_if_allowed()
        runner.stop()
        if attempt.blocked is not None:
            print_sentences([f"{batch.name} is blocked: {attempt.blocked}"], err)
        # As in a worker, children sent before a failure are executed.
        results = _work_on_messages(messages, runner, run=started.id)
        if runner.tracing is not None:
            runner.tracing.close()
    if attempt.held is not None:
        print_sentences([f"{batch.name} is held: {attempt.held}"], err)
    if attempt.state in ("succeeded", "blocked", "skipped"):
        return attempt.result_fields() | results
    if attempt.state is None:
        raise Problem(f"the run of {batch.name} was taken from this process: its heartbeat was late")
    retry = "" if by_hand else "; workers will retry it"
    raise Problem(f"{batch.name} failed: {_describe_cause(attempt.error)}{retry}") from attempt.error


def _describe_cause(error: BaseException | None) -> str:
    """Describe the cause of a failure and its remedy."""
    if error is None:
        return "unknown"
    said = describe_error(error)
    return describe_with_remedy(error) or (
        said if CHECK_COMMAND in said else f"{said}; run {CHECK_COMMAND}` to find the cause"
    )


def _work_on_messages(
    messages: list[tuple[ChildSpec, list[KeyedArguments]]], runner: Runner, *, run: int
) -> dict[str, Any]:
    """Execute the children of a run in this process until drained; return their results."""
    outcomes: list[dict[str, Any]] = []
    failures: list[str] = []
    for child, calls in messages:
        left = calls
        while left and not shutdown.requested.is_set():
            message = execute_message(runner, child, left, run)
            for attempt in message.ended:
                if attempt.error is not None:
                    failures.append(f"{attempt.message_id}: {_describe_cause(attempt.error)}")
                    continue
                if attempt.blocked is not None:
                    print_sentences([f"{attempt.message_id} is blocked: {attempt.blocked}"], err)
                outcomes.append(attempt.result_fields())
            left = message.successors
    if failures:
        count = f"{len(failures)} of {sum(len(calls) for _child, calls in messages)} children failed"
        raise Problem(f"{count}, the first {failures[0]}; the next run will retry them")
    return {"children": outcomes} if messages else {}


@contextmanager
def _stop_at_safe_point(within: timedelta) -> Iterator[None]:
    """Stop the run at its next safe point after Ctrl-C or SIGTERM.

    A second signal, or the end of the time *within*, ends the process at once. A thread listens for signals, because
    Python calls no handler while libpq waits for a server that hangs.
    """
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    wakeup = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    DaemonThread(partial(_listen_for_signals, reading, within.total_seconds()), "signals").start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        writing.close()  # ends the listener


def _listen_for_signals(reading: socket.socket, within: float) -> None:
    with reading:
        first = reading.recv(1)
        if not first:
            return
        shutdown.requested.set()
        reading.settimeout(within)
        with suppress(TimeoutError):
            if not reading.recv(1):
                return
    err.print("forgekeeper: interrupted before the run reached a safe point", style="red")
    terminate_git_processes()
    os._exit(128 + first[0])


@contextmanager
def _show_progress(attempt: Attempt) -> Iterator[None]:
    """Show the number of deleted records on a terminal during the run."""
    ended, name = threading.Event(), attempt.declared.name

    def show_count() -> None:
        while not ended.wait(0.5):
            show_progress_line(f"{name}: {attempt.run.deadline.done:,} done")

    shower = DaemonThread(show_count, "progress")
    if err.is_terminal:
        shower.start()
    try:
        yield
    finally:
        ended.set()
        if shower.ident:
            shower.join()
            show_progress_line("")
