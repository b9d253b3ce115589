"""`python -m forgekeeper.process`: dramatiq's own command line, with our log lines from the first one on."""

from __future__ import annotations

import signal
import sys
from datetime import timedelta

from dramatiq.cli import HANDLED_SIGNALS, main, make_argument_parser

from forgekeeper.boot import load
from forgekeeper.process.master import kill_late_processes
from metrics import logs
from metrics.counting import WORKER
from metrics.multiprocess import Watch

READY_TIMEOUT = timedelta(seconds=5)
"""How long the master waits for a process to say that it is ready, and hears nothing else: not that it has died."""


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
    ready_timeout = str(round(READY_TIMEOUT.total_seconds() * 1000))
    ours = [
        "forgekeeper.delivery.broker:load_batches",
        "--path",
        "--skip-logging",
        "--worker-fork-timeout",
        ready_timeout,
    ]
    status: int = main(make_argument_parser().parse_args([*ours, *arguments]))
    return status


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
