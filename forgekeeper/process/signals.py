"""The signals by which a process is asked to end: from its supervisor, its master, the kernel, or all of them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import FrameType

PR_SET_PDEATHSIG = 1

draining = threading.Event()
"""Set from the first signal on: nothing is fetched or started any more."""
at_last: list[Callable[[], None]] = []
"""What a process tries in its last second, should it not end in an orderly way; each may hang."""


def requests() -> SimpleQueue[None]:
    """Return a queue into which each SIGTERM and Ctrl-C puts something, from here on.

    Not an event: whoever sets or awaits one holds its lock for a moment, and a signal that
    interrupts him just then would wait for that lock for ever.
    """
    asked: SimpleQueue[None] = SimpleQueue()

    def received(_number: int, _frame: FrameType | None) -> None:
        asked.put(None)

    signal.signal(signal.SIGTERM, received)
    signal.signal(signal.SIGINT, received)
    return asked


def end_with_parent() -> None:
    """Let the kernel send this process SIGTERM when its parent dies, however it dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def follow() -> None:
    """Drain at the first SIGTERM, whatever comes after it; end with the master, at once if it is dead already.

    Dramatiq takes a second signal for "drop everything".  But a terminal, systemd and the
    kernel say it more than once: to the group and by the master, or for each thread of a
    master that was killed.  Call it in the main thread of a process that Dramatiq forked.
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
        draining.set()
        for call in once:
            call(number, frame)

    signal.signal(signal.SIGTERM, first)
    signal.signal(signal.SIGHUP, first)
