"""The master of worker processes: Dramatiq's own waits for its processes for ever, and this one does not.

A process that is stopped, that the kernel holds, or that hangs in a call into C ends neither by SIGTERM nor by itself
(dramatiq 2.2.1, `dramatiq/cli.py`, joins it again and again).  What it worked on is found lost, as after any death.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from datetime import timedelta
from select import select
from threading import Thread

import structlog

from forgekeeper.process import drain

LOOK = 0.5

log = structlog.get_logger(__name__)


def kill_late_processes(allowed: timedelta) -> None:
    """Kill the processes of this master that live shortly before the *allowed* time is up.

    The time begins with the first signal, or with the first end of a process: then all are asked to end.
    """
    # Dramatiq has handlers of its own; here each signal leaves a byte.
    signals, waking = os.pipe()
    os.set_blocking(waking, False)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    until_killed = allowed.total_seconds() - drain.reserve(allowed) / 2
    Thread(target=_watch, args=(signals, until_killed), name="master", daemon=True).start()


def _watch(signals: int, allowed: float) -> None:
    most = 0
    while True:
        alive = len(multiprocessing.active_children())
        most = max(most, alive)
        if alive < most or select([signals], [], [], LOOK)[0]:
            break
    time.sleep(allowed)
    if late := multiprocessing.active_children():
        log.critical("worker killed processes that did not end", pids=[process.pid for process in late])
    for process in late:
        process.kill()
