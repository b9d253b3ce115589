"""The life of a worker process: it says that it is ready, takes signals to end, and ends, whatever hangs.

What it works on may go on for a while after the first signal.  Dramatiq's own end waits for its threads, and they wait
for servers: for a Redis that is away to take an acknowledgement, for as long as it is away.  Whatever such a thread
still works on is safe without it: a run whose row stays open is found lost, a message is sent again.
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
"""Seconds in which an idle process ends by itself; one whose servers are away does not."""
SIGN_SECONDS = 5.0
"""Seconds between two signs of life of a process."""
LAST_WORDS = 1.2
"""Seconds for what a process tries last: less than servers that are away would take."""
TIME_UP = 1
"""The status of a process that still worked when its time was up."""

PR_SET_PDEATHSIG = 1

at_last: list[Callable[[], None]] = []
"""What a process tries in its last second, should it not end in an orderly way; each may hang."""

log = structlog.get_logger(__name__)


def tell_supervisor(*facts: str) -> None:
    """Send facts such as ``READY=1`` or ``STATUS=…`` to systemd, if that is who has started us; see sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        # A supervisor that does not listen must not hold up who has better things to do.
        supervisor.setblocking(False)
        # With an at sign it is a name of the kernel's own, which has a NUL instead.
        supervisor.sendto("\n".join(facts).encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)


def mark(*, ready: bool) -> None:
    """Say to the endpoint of this worker whether this process takes messages, and that it lives now."""
    folder = os.environ.get(FOLDER)
    if folder:
        file = Path(folder) / f"{os.getpid()}{READY}"
        with suppress(OSError):
            if ready:
                file.write_text(str(time.monotonic()))
            else:
                file.unlink(missing_ok=True)


def end_with_parent() -> None:
    """Let the kernel send this process SIGTERM when its parent dies, however it dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def follow() -> None:
    """Drain at the first SIGTERM, whatever comes after it; end with the master, at once if it is dead already.

    Dramatiq takes a second signal for "drop everything".  But a terminal, systemd and the kernel say it more than once:
    to the group and by the master, or for each thread of a master that was killed.  Call it in the main thread of a
    process that Dramatiq forked.
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
        # A second signal may interrupt us up to here, and do all of this before we go on.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # Its lock is safe here: the main thread, which a signal interrupts, never waits for this event.
        shutdown.requested.set()
        for call in once:
            call(number, frame)

    signal.signal(signal.SIGTERM, first)
    signal.signal(signal.SIGHUP, first)


def reserve(shutdown_timeout: timedelta) -> float:
    """Return how many of those seconds a worker's processes leave to their master, and to their own last words."""
    return min(3.0, shutdown_timeout.total_seconds() / 2)


@contextmanager
def needed() -> Iterator[None]:
    """Let the process end where a hook fails: Dramatiq would swallow that, and go on with half a process."""
    try:
        yield
    except Exception as error:
        log.critical("process ends itself", reason="it cannot start", exc_info=error)
        raise SystemExit(1) from error


class Drain:
    """Ends the process when its shutdown takes too long; *working* lists what its threads work on."""

    def __init__(self, working: Callable[[], list[dict[str, object]]], allowed: timedelta) -> None:
        self._working = working
        self._allowed = allowed
        self._worker: Worker | None = None
        Thread(self._watch, "drain").start()

    def ready(self, worker: Worker) -> None:
        """Say that the process takes messages."""
        self._worker = worker
        if shutdown.requested.is_set():
            return
        mark(ready=True)
        queues = sorted({q_name(queue) for queue in worker.consumers})
        tell_supervisor("READY=1", f"STATUS=working on {', '.join(queues)}")
        log.info("worker ready", worker=identity(), queues=queues, threads=len(worker.workers))

    def _watch(self) -> None:
        """End the process when its time is up, or when it is idle and does not end; before, give signs of life."""
        while not shutdown.requested.wait(SIGN_SECONDS):
            if self._worker is not None and find_stalled() is None:
                mark(ready=True)
        time_up = time.monotonic() + self._allowed.total_seconds() - reserve(self._allowed)
        # Dramatiq's main thread does this up to a second later.
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
    """Try what is left to be tried, for a moment, and end the process.

    Not by an exception or a signal: the main thread waits for the others, and a thread in a call into C, into libpq
    say, hears of neither.  What is skipped is what a fork of Dramatiq's master skips anyway: no exit handler runs in
    one.
    """
    # Beside one another: each may wait for a server of its own, and hang.
    threads = [Thread(step, timeout=LAST_WORDS) for step in (tell, end_programs, *at_last)]
    ends = time.monotonic() + LAST_WORDS
    for thread in threads:
        with suppress(RuntimeError, MemoryError):  # no thread can be had: the end is not put off for that
            thread.start()
    for thread in filter(Thread.is_alive, threads):
        thread.join(max(0.0, ends - time.monotonic()))
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(status)


def end_programs() -> None:
    """Let every git that this process has started end, and clean up after itself."""
    for listed in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            for pid in map(int, listed.read_text().split()):
                # Each leads a session of its own.
                os.killpg(pid, signal.SIGTERM)
