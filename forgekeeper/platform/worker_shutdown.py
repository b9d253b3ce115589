"""The end of a worker process: signals, and a time limit for the work in flight.

Work may continue for a while after the first signal.  Dramatiq's own shutdown waits for its threads, and these wait
for servers: for example for Redis to accept an acknowledgement, for as long as Redis is down.  Work that is interrupted
in such a thread is not lost: an open run is reopened, and a message is sent again.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NoReturn

import structlog
from dramatiq import Worker
from dramatiq.common import q_name

from forgekeeper.platform import shutdown
from forgekeeper.platform.connections import process_identity
from forgekeeper.platform.readiness import mark_readiness
from metrics.supervisor import tell_supervisor
from metrics.threads import DaemonThread, find_stalled

IDLE_END_SECONDS = 2.0
"""Time in seconds in which an idle process normally ends by itself; otherwise its threads wait for servers."""
READINESS_INTERVAL_SECONDS = 5.0
"""Seconds between two updates of a process's readiness file."""
LAST_STEPS_SECONDS = 1.2
"""Time limit of the steps of `last_steps` in seconds: shorter than the timeouts of unreachable servers."""
TIMED_OUT_STATUS = 1
"""Exit status of a process that still worked at the end of its shutdown time."""

PR_SET_PDEATHSIG = 1

last_steps: list[Callable[[], None]] = []
"""Steps in the last second of a process that does not end in an orderly way; each step may hang."""

log = structlog.get_logger(__name__)


def end_with_parent() -> None:
    """Let the kernel send this process SIGTERM when its parent dies, whatever the cause."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def drain_on_signals() -> None:
    """Drain at the first SIGTERM, ignore later signals, and end when the master dies.

    Dramatiq drops all work at a second signal.  But a terminal, systemd and the kernel send several: to the group and
    by the master, or for each thread of a killed master.  If the master is dead already, drain at once.  Call this in
    the main thread of a process that Dramatiq forked.
    """
    master = multiprocessing.parent_process()
    if master is None:
        return
    _drain_once()
    end_with_parent()
    if os.getppid() != master.pid:
        os.kill(os.getpid(), signal.SIGTERM)


def _drain_once() -> None:
    drain = signal.getsignal(signal.SIGTERM)
    assert callable(drain)
    once = iter([drain])

    def drain_first(number: int, frame: FrameType | None) -> None:
        # Until here a second signal may interrupt this function and execute all of it first.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # The event's lock cannot deadlock: a signal interrupts the main thread, which never waits for this event.
        shutdown.requested.set()
        for call in once:
            call(number, frame)

    signal.signal(signal.SIGTERM, drain_first)
    signal.signal(signal.SIGHUP, drain_first)


def reserved_seconds(shutdown_timeout: timedelta) -> float:
    """Return the seconds of the timeout that processes leave to their master and to `last_steps`."""
    return min(3.0, shutdown_timeout.total_seconds() / 2)


@contextmanager
def exit_on_error() -> Iterator[None]:
    """End the process if a hook fails: Dramatiq would ignore the error and continue."""
    try:
        yield
    except Exception as error:
        log.critical("process ends itself", reason="the worker cannot start", exc_info=error)
        raise SystemExit(1) from error


class ShutdownWatchdog:
    """Ends the process when its shutdown takes too long; *list_in_flight* lists its work in flight."""

    def __init__(self, list_in_flight: Callable[[], list[dict[str, object]]], timeout: timedelta) -> None:
        self._list_in_flight = list_in_flight
        self._timeout = timeout
        self._worker: Worker | None = None
        DaemonThread(self._watch_shutdown, "drain").start()

    def announce_ready(self, worker: Worker) -> None:
        """Announce that the process takes messages."""
        self._worker = worker
        if shutdown.requested.is_set():
            return
        mark_readiness(ready=True)
        queues = sorted({q_name(queue) for queue in worker.consumers})
        tell_supervisor("READY=1", f"STATUS=working on {', '.join(queues)}")
        log.info("worker ready", worker=process_identity(), queues=queues, threads=len(worker.workers))

    def _watch_shutdown(self) -> None:
        """Update readiness until shutdown; then end a process that is idle or out of time."""
        while not shutdown.requested.wait(READINESS_INTERVAL_SECONDS):
            if self._worker is not None and find_stalled() is None:
                mark_readiness(ready=True)
        time_up = time.monotonic() + self._timeout.total_seconds() - reserved_seconds(self._timeout)
        # Dramatiq's main thread would stop them up to a second later.
        for thread in self._worker.workers if self._worker else ():
            thread.stop()
        mark_readiness(ready=False)
        idle_since = time.monotonic()
        while time.monotonic() < time_up:
            if self._list_in_flight():
                idle_since = time.monotonic()
            elif time.monotonic() > idle_since + min(IDLE_END_SECONDS, reserved_seconds(self._timeout)):
                log.warning("worker ended while threads waited for servers")
                _end_process(status=0)
            time.sleep(0.05)
        if in_flight := self._list_in_flight():
            _end_process(
                status=TIMED_OUT_STATUS, log_reason=lambda: log.critical("shutdown timed out", at_work=in_flight)
            )
        _end_process(status=0)


def _end_process(*, status: int, log_reason: Callable[[], None] = lambda: None) -> NoReturn:
    """Execute the last steps within `LAST_STEPS_SECONDS`, and end the process.

    An exception or a signal would not end it: the main thread waits for the others, and a thread in C code, such as
    libpq, receives neither.  `os._exit` skips exit handlers, but these never run in a fork of Dramatiq's master.
    """
    # In parallel: each step may wait for another server, and hang.
    threads = [
        DaemonThread(step, timeout=LAST_STEPS_SECONDS) for step in (log_reason, terminate_git_processes, *last_steps)
    ]
    ends = time.monotonic() + LAST_STEPS_SECONDS
    for thread in threads:
        with suppress(RuntimeError, MemoryError):  # a thread that cannot start must not delay the end
            thread.start()
    for thread in filter(DaemonThread.is_alive, threads):
        thread.join(max(0.0, ends - time.monotonic()))
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(status)


def terminate_git_processes() -> None:
    """Send SIGTERM to every git that this process has started, so that git cleans up."""
    for listed in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            for pid in map(int, listed.read_text().split()):
                # Each git is the leader of its own session.
                os.killpg(pid, signal.SIGTERM)
