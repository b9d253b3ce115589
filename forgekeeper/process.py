"""`python -m forgekeeper.process`: dramatiq's own command line, with our log lines from the first one on.

Its master waits for its processes for ever, and this one does not.  A process that is stopped, that the kernel holds,
or that hangs in a call into C ends neither by SIGTERM nor by itself (dramatiq 2.2.1, `dramatiq/cli.py`, joins it again
and again).  What it worked on is found lost, as after any death.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from select import select

import structlog
from dramatiq.cli import HANDLED_SIGNALS, main, make_argument_parser

from forgekeeper.delivery.boot import load
from forgekeeper.platform.lifetime import TIME_UP, reserve
from metrics import logs
from metrics.counting import WORKER
from metrics.endpoint import Watch
from metrics.threads import Thread

READY_TIMEOUT = "5000"
"""For so many milliseconds the master waits for a process to be ready, and hears nothing else: not that it has died."""
LOOK = 0.5
GONE = 0.7
"""Seconds in which the kernel ends what is killed; what it does not end by then, it holds, for a disk perhaps."""
LAST_STEPS = 10.0
"""Seconds in which a master without processes ends, or reloads; else one took a lock with it that it waits for."""

log = structlog.get_logger("forgekeeper.process")


def run(arguments: list[str]) -> int:
    """Run dramatiq's master process with *arguments*; return its exit status."""
    # Dramatiq blocks them in its thread alone: one of ours would take them before its handlers are there.
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
    settings = load()
    logs.configure(settings.log_format, settings.log_level)
    if settings.metrics_port_worker and not WORKER.in_files:
        # Everything would be counted in memory, and its page be empty.
        sys.stderr.write("forgekeeper: `forgekeeper worker` starts workers; this program lacks what it prepares\n")
        return 2
    if settings.metrics_port_worker:
        Watch(settings.metrics_host, settings.metrics_port_worker).start()
    kill_late_processes(settings.shutdown_timeout)
    # On SIGHUP dramatiq becomes what stands here, in the same process: with a new program, and the same page.
    sys.argv = [sys.executable, "-P", "-m", "forgekeeper.process", *arguments]
    # No --path: dramatiq would put the current folder before everything that is installed.
    ours = ["forgekeeper.delivery.broker:load_batches", "--path", "--skip-logging"]
    ours += ["--worker-fork-timeout", READY_TIMEOUT]
    status: int = main(make_argument_parser().parse_args([*ours, *arguments]))
    return status


def kill_late_processes(allowed: timedelta) -> None:
    """Kill the processes of this master that live shortly before the *allowed* time is up.

    The time begins with the first signal, or with the first end of a process: then all are asked to end.
    """
    # Dramatiq has handlers of its own; here each signal leaves a byte.
    signals, waking = os.pipe()
    os.set_blocking(waking, False)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    # A process that was forked would leave its own signals there, too.
    os.register_at_fork(after_in_child=partial(signal.set_wakeup_fd, -1))
    until_killed = allowed.total_seconds() - reserve(allowed) / 2
    Thread(partial(_watch, signals, until_killed), "master").start()


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
    time.sleep(GONE)
    held = [process.pid for process in multiprocessing.active_children()]
    if not held:
        time.sleep(LAST_STEPS)
    log.critical("worker does not wait any longer", pids=held)
    os._exit(TIME_UP)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
