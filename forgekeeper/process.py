"""`python -m forgekeeper.process`: dramatiq's command line, with our log from the start.

Dramatiq's master waits for its processes without a limit; this master has one.  A process that is stopped, that the
kernel holds, or that hangs in a call into C ends neither by SIGTERM nor by itself (dramatiq 2.2.1, `dramatiq/cli.py`,
joins it again and again).  Its work is found lost, as after any death.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait

import structlog
from dramatiq.cli import HANDLED_SIGNALS, main, make_argument_parser

from forgekeeper.delivery.boot import load_settings
from forgekeeper.delivery.error_reports import ErrorReporter
from forgekeeper.platform.worker_shutdown import TIMED_OUT_STATUS, reserved_seconds
from metrics import logs
from metrics.endpoint import EndpointWatch
from metrics.instruments import WORKER_METRICS
from metrics.supervisor import is_watched, start_watchdog
from metrics.threads import DaemonThread

READY_TIMEOUT_MILLISECONDS = "5000"
"""Milliseconds that the master waits for a process to be ready; meanwhile it does not notice that process's death."""
CHILD_POLL_SECONDS = 2.0
"""Seconds between two looks for started processes; the end of a known process or a signal is noticed at once."""
KILL_WAIT_SECONDS = 0.7
"""Seconds for the kernel to end a killed process; a later one is held by the kernel, perhaps for a disk."""
EXIT_GRACE_SECONDS = 10.0
"""Seconds for a master without processes to end or reload; else it waits for a lock that a dead process held."""

log = structlog.get_logger("forgekeeper.process")


def run_master(arguments: list[str]) -> int:
    """Run dramatiq's master process with *arguments*; return its exit status."""
    # Dramatiq blocks these signals in its own thread only: a thread of ours would get them before its handlers exist.
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
    settings = load_settings()
    reporter = ErrorReporter.from_settings(settings)
    logs.configure(settings.log_format, settings.log_level, on_error=reporter.report_line if reporter else None)
    if settings.metrics_port_worker and not WORKER_METRICS.uses_files:
        # Counters would stay in memory, and the metrics page would be empty.
        sys.stderr.write(
            "forgekeeper: start workers with `forgekeeper worker`, which prepares the files of their metrics\n"
        )
        return 2
    if settings.metrics_port_worker:
        endpoint = EndpointWatch(settings.metrics_host, settings.metrics_port_worker)
        endpoint.start()
        start_watchdog(endpoint.find_stalled_process)
    elif is_watched():
        sys.stderr.write(
            "forgekeeper: WatchdogSec needs the metrics port of a worker: set FORGEKEEPER_METRICS_PORT_WORKER\n"
        )
        return 2
    kill_late_processes(settings.shutdown_timeout)
    # On SIGHUP dramatiq executes this command in the same process: with a new program, and the same metrics page.
    sys.argv = [sys.executable, "-P", "-m", "forgekeeper.process", *arguments]
    # No --path: dramatiq would search the current folder before all installed packages.
    ours = ["forgekeeper.delivery.broker:load_batches", "--path", "--skip-logging"]
    ours += ["--worker-fork-timeout", READY_TIMEOUT_MILLISECONDS]
    status: int = main(make_argument_parser().parse_args([*ours, *arguments]))
    return status


def kill_late_processes(allowed: timedelta) -> None:
    """Kill the living processes of this master shortly before the *allowed* time is up.

    The time begins with the first signal or the first end of a process: then all processes are asked to end.
    """
    # Dramatiq has its own handlers; through this pipe each signal also sends a byte.
    signals, waking = os.pipe()
    os.set_blocking(waking, False)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    # A forked process would write its own signals into the pipe, too.
    os.register_at_fork(after_in_child=partial(signal.set_wakeup_fd, -1))
    until_killed = allowed.total_seconds() - reserved_seconds(allowed) / 2
    DaemonThread(partial(_kill_late_children, signals, until_killed), "master").start()


def _kill_late_children(signals: int, allowed: float) -> None:
    most = 0
    while True:
        alive = multiprocessing.active_children()
        most = max(most, len(alive))
        ended = [process.sentinel for process in alive]
        if len(alive) < most or signals in wait([signals, *ended], CHILD_POLL_SECONDS):
            break
    time.sleep(allowed)
    if late := multiprocessing.active_children():
        log.critical("worker killed processes that did not end", pids=[process.pid for process in late])
    for process in late:
        process.kill()
    time.sleep(KILL_WAIT_SECONDS)
    held = [process.pid for process in multiprocessing.active_children()]
    if not held:
        time.sleep(EXIT_GRACE_SECONDS)
    log.critical("worker stopped waiting for its processes", pids=held)
    os._exit(TIMED_OUT_STATUS)


if __name__ == "__main__":
    sys.exit(run_master(sys.argv[1:]))
