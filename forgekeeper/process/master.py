"""Patch of `multiprocessing.Process`: Dramatiq's master waits for its processes, but not for ever.

A process that is stopped, that the kernel holds, or that hangs in a call into C ends neither by SIGTERM nor by itself,
and the master of Dramatiq 2.2.1 (`dramatiq/cli.py`) joins it again and again.  Here it kills it; what it had in hand is
reclaimed as after any death.  It may go when `test_a_master_joins_a_process_that_does_not_end_for_ever` in
`tests/engine/test_patches.py` fails.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from datetime import timedelta
from multiprocessing.connection import wait

import structlog

from forgekeeper.process import drain

GONE = 0.7
"""Seconds in which the kernel ends what is killed; what it does not end by then, it holds."""
LOOK = 1.0
"""Seconds between two looks while nobody was told to end: as often as Dramatiq's own, of which each costs 0.2 ms."""

log = structlog.get_logger(__name__)


class Vigil:
    """How long a master waits for its processes, from the first signal on, or from the first end of one of them.

    Then all are told to end.  What is left shortly before the *allowed* time is up is killed.
    """

    def __init__(self, allowed: timedelta) -> None:
        self._timeout = allowed.total_seconds() - drain.reserve(allowed) / 2
        self._processes: list[multiprocessing.Process] = []
        self._told_at: float | None = None
        # Dramatiq's master has handlers of its own, and signals that came before them wait: here each leaves a byte.
        self.signals, waking = os.pipe()
        for descriptor in (self.signals, waking):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)

    def watch(self, process: multiprocessing.Process) -> None:
        """Be responsible for the end of a process, too."""
        self._processes.append(process)

    def look(self) -> float:
        """Kill who is late; return in how many seconds to look again."""
        left = [process for process in self._processes if process.exitcode is None]
        told = self._told()
        if self._told_at is None:
            if not told and len(left) == len(self._processes):
                return LOOK
            self._told_at = time.monotonic()
        late = time.monotonic() - self._told_at - self._timeout
        if late >= 0 and left:
            _end(left, at_once=late > GONE)
        return max(0.05, min(LOOK, -late))

    def _told(self) -> bool:
        try:
            return bool(os.read(self.signals, 100))
        except BlockingIOError:
            return False


def _end(left: list[multiprocessing.Process], *, at_once: bool) -> None:
    pids = [process.pid for process in left]
    if at_once:
        # They die as soon as the kernel lets them, of a disk perhaps.  Exit handlers would wait for them.
        log.critical("worker left processes behind, the kernel does not end them", pids=pids)
        os._exit(drain.TIME_UP)
    log.critical("worker killed processes that did not end", pids=pids)
    for process in left:
        process.kill()


def install(allowed: timedelta) -> None:
    """Let Dramatiq's master, which this process is to become, kill its processes shortly before *allowed* is up."""
    multiprocessing.Process = overseen(Vigil(allowed))  # type: ignore[misc]


def overseen(vigil: Vigil) -> type[multiprocessing.Process]:
    """Return processes of which the *vigil* is kept while the master joins each for a second, again and again."""

    class Overseen(multiprocessing.Process):
        def start(self) -> None:
            super().start()
            vigil.watch(self)

        def run(self) -> None:
            # Its signals are its own affair.
            signal.set_wakeup_fd(-1)
            super().run()

        def join(self, timeout: float | None = None) -> None:
            soon = vigil.look()
            if self.sentinel in wait([self.sentinel, vigil.signals], soon if timeout is None else min(soon, timeout)):
                super().join(timeout)

    return Overseen
