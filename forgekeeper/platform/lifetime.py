"""The life of a worker process: readiness, signals, and an end within a time limit.

Work may continue for a while after the first signal.  Dramatiq's own shutdown waits for its threads, and these wait
for servers: for example for Redis to accept an acknowledgement, for as long as Redis is down.  Work that is interrupted
in such a thread is not lost: an open run is reopened, and a message is sent again.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
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
from forgekeeper.platform.connections import identity
from metrics.endpoint import FOLDER, READY
from metrics.threads import Thread, find_stalled

SOON = 2.0
"""Time in seconds in which an idle process normally ends by itself; otherwise its threads wait for servers."""
SIGN_SECONDS = 5.0
"""Seconds between two updates of a process's readiness file."""
LAST_WORDS = 1.2
"""Time limit of the steps of `at_last` in seconds: shorter than the timeouts of unreachable servers."""
TIME_UP = 1
"""Exit status of a process that still worked at the end of its shutdown time."""

PR_SET_PDEATHSIG = 1

at_last: list[Callable[[], None]] = []
"""Steps in the last second of a process that does not end in an orderly way; each step may hang."""

log = structlog.get_logger(__name__)


def tell_supervisor(*facts: str) -> None:
    """Send facts such as ``READY=1`` or ``STATUS=…`` to systemd, if it started this process.

    See sd_notify(3).
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        # A supervisor that does not read must not block this process.
        supervisor.setblocking(False)
        # An at sign marks an abstract socket, whose name begins with a NUL.
        supervisor.sendto("\n".join(facts).encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)


def mark(*, ready: bool) -> None:
    """Tell this worker's endpoint that this process is alive, and whether it takes messages."""
    folder = os.environ.get(FOLDER)
    if folder:
        file = Path(folder) / f"{os.getpid()}{READY}"
        with suppress(OSError):
            if ready:
                file.write_text(str(time.monotonic()))
            else:
                file.unlink(missing_ok=True)


def end_with_parent() -> None:
    """Let the kernel send this process SIGTERM when its parent dies, whatever the cause."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def follow() -> None:
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

    def first(number: int, frame: FrameType | None) -> None:
        # Until here a second signal may interrupt this function and execute all of it first.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # The event's lock cannot deadlock: a signal interrupts the main thread, which never waits for this event.
        shutdown.requested.set()
        for call in once:
            call(number, frame)

    signal.signal(signal.SIGTERM, first)
    signal.signal(signal.SIGHUP, first)


def reserve(shutdown_timeout: timedelta) -> float:
    """Return the seconds of the timeout that processes leave to their master and to `at_last`."""
    return min(3.0, shutdown_timeout.total_seconds() / 2)


@contextmanager
def needed() -> Iterator[None]:
    """End the process if a hook fails: Dramatiq would ignore the error and continue."""
    try:
        yield
    except Exception as error:
        log.critical("process ends itself", reason="it cannot start", exc_info=error)
        raise SystemExit(1) from error


class Drain:
    """Ends the process when its shutdown takes too long; *working* lists its work in flight."""

    def __init__(self, working: Callable[[], list[dict[str, object]]], allowed: timedelta) -> None:
        self._working = working
        self._allowed = allowed
        self._worker: Worker | None = None
        Thread(self._watch, "drain").start()

    def ready(self, worker: Worker) -> None:
        """Announce that the process takes messages."""
        self._worker = worker
        if shutdown.requested.is_set():
            return
        mark(ready=True)
        queues = sorted({q_name(queue) for queue in worker.consumers})
        tell_supervisor("READY=1", f"STATUS=working on {', '.join(queues)}")
        log.info("worker ready", worker=identity(), queues=queues, threads=len(worker.workers))

    def _watch(self) -> None:
        """Update readiness until shutdown; then end a process that is idle or out of time."""
        while not shutdown.requested.wait(SIGN_SECONDS):
            if self._worker is not None and find_stalled() is None:
                mark(ready=True)
        time_up = time.monotonic() + self._allowed.total_seconds() - reserve(self._allowed)
        # Dramatiq's main thread would stop them up to a second later.
        for thread in self._worker.workers if self._worker else ():
            thread.stop()
        mark(ready=False)
        idle_since = time.monotonic()
        while time.monotonic() < time_up:
            if self._working():
                idle_since = time.monotonic()
            elif time.monotonic() > idle_since + min(SOON, reserve(self._allowed)):
                log.warning("worker ends although threads wait for servers")
                _end(status=0)
            time.sleep(0.05)
        if in_flight := self._working():
            _end(status=TIME_UP, tell=lambda: log.critical("shutdown timed out", at_work=in_flight))
        _end(status=0)


def _end(*, status: int, tell: Callable[[], None] = lambda: None) -> NoReturn:
    """Execute the last steps within `LAST_WORDS`, and end the process.

    An exception or a signal would not end it: the main thread waits for the others, and a thread in C code, such as
    libpq, receives neither.  `os._exit` skips exit handlers, but these never run in a fork of Dramatiq's master.
    """
    # In parallel: each step may wait for another server, and hang.
    threads = [Thread(step, timeout=LAST_WORDS) for step in (tell, end_programs, *at_last)]
    ends = time.monotonic() + LAST_WORDS
    for thread in threads:
        with suppress(RuntimeError, MemoryError):  # a thread that cannot start must not delay the end
            thread.start()
    for thread in filter(Thread.is_alive, threads):
        thread.join(max(0.0, ends - time.monotonic()))
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(status)


def end_programs() -> None:
    """Send SIGTERM to every git that this process has started, so that git cleans up."""
    for listed in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            for pid in map(int, listed.read_text().split()):
                # Each git is the leader of its own session.
                os.killpg(pid, signal.SIGTERM)
