"""The master's side of an end: it waits for its processes, but not for ever.

A process that is stopped, that the kernel holds, or that hangs in a call into C ends neither by
SIGTERM nor by itself.  The master kills it; what it had in hand is rescued as after any death.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from types import FrameType

import structlog

from workers import drain

GONE = 0.7
"""Seconds in which the kernel ends what is killed; what it does not end by then, it holds."""

log = structlog.get_logger(__name__)


class Vigil:
    """How long a master waits for its processes, from the first signal on, or from the first end of one of them.

    Then all are told to end.  What is left shortly before the *allowed* time is up is killed.
    """

    def __init__(self, allowed: timedelta) -> None:
        self._patience = allowed.total_seconds() - drain.reserve(allowed) / 2
        self._processes: list[multiprocessing.Process] = []
        self._follows = False
        self._told_at: float | None = None

    def watch(self, process: multiprocessing.Process) -> None:
        """Be responsible for the end of a process, too."""
        self._processes.append(process)

    def look(self) -> float:
        """Kill who is late; return in how many seconds to look again."""
        self._follow()
        left = [process for process in self._processes if process.exitcode is None]
        if self._told_at is None:
            if len(left) < len(self._processes):
                self._told_at = time.monotonic()
            return 1.0
        late = time.monotonic() - self._told_at - self._patience
        if late >= 0 and left:
            _end(left, at_once=late > GONE)
        return max(0.05, min(1.0, -late))

    def _follow(self) -> None:
        """Note the first signal; Dramatiq's master has its handlers by the time it waits."""
        if self._follows:
            return
        self._follows = True
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            handler = signal.getsignal(number)
            assert callable(handler)
            signal.signal(number, self._noting(handler))

    def _noting(self, handler: Callable[[int, FrameType | None], object]) -> Callable[[int, FrameType | None], None]:
        def noting(number: int, frame: FrameType | None) -> None:
            self._told_at = self._told_at or time.monotonic()
            handler(number, frame)

        return noting


def _end(left: list[multiprocessing.Process], *, at_once: bool) -> None:
    pids = [process.pid for process in left]
    if at_once:
        # They die as soon as the kernel lets them, of a disk perhaps.  Exit handlers would wait for them.
        log.critical("worker left processes behind, the kernel does not end them", pids=pids)
        os._exit(drain.TIME_UP)
    log.critical("worker killed processes that did not end", pids=pids)
    for process in left:
        process.kill()


def impatient(vigil: Vigil) -> type[multiprocessing.Process]:
    """Return what stands in for `multiprocessing.Process`: a master joins each for a second, again and again."""

    class Impatient(multiprocessing.Process):
        def start(self) -> None:
            super().start()
            vigil.watch(self)

        def join(self, timeout: float | None = None) -> None:
            soon = vigil.look()
            super().join(soon if timeout is None else min(soon, timeout))

    return Impatient
