"""How a worker process takes the signals that ask it to end, which may come more than once."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable
from types import FrameType

from forgekeeper import shutdown

PR_SET_PDEATHSIG = 1

at_last: list[Callable[[], None]] = []
"""What a process tries in its last second, should it not end in an orderly way; each may hang."""


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
        shutdown.requested.set()
        for call in once:
            call(number, frame)

    signal.signal(signal.SIGTERM, first)
    signal.signal(signal.SIGHUP, first)
