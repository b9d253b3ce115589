"""`python -m workers`: dramatiq's own command line, with our log lines from the first one on."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from types import FrameType

from dramatiq.cli import main, make_argument_parser

from metrics import logs
from metrics.counting import WORKER
from settings.reading import load

WORD = timedelta(seconds=5)
"""How long the master waits for a process to say that it is up, and hears nothing else: not that it has died."""
BOOT = timedelta(minutes=1)
"""Far longer than a master takes that does not hang."""


def run(arguments: list[str], *, boot: timedelta = BOOT) -> int:
    """Run dramatiq's master process with *arguments*; return its exit status.

    A master that is not up after *boot* ends, and its processes with it.
    """
    settings = load()
    logs.configure(settings.log_format, settings.log_level)
    if settings.metrics_port_worker and not WORKER.in_files:
        # Everything would be counted in memory, and its page be empty.
        sys.stderr.write("forgekeeper: `forgekeeper worker` starts workers; this program lacks what it prepares\n")
        return 2
    _end_unless_up_after(boot)
    # On SIGHUP dramatiq becomes what stands here, in the same process: with a new program, and the same page.
    sys.argv = [sys.executable, "-m", "workers", *arguments]
    # No --path: dramatiq would put the current folder before everything that is installed.
    ours = ["workers", "--path", "--skip-logging", "--worker-fork-timeout", str(round(WORD.total_seconds() * 1000))]
    status: int = main(make_argument_parser().parse_args([*ours, *arguments]))
    return status


def _end_unless_up_after(boot: timedelta) -> None:
    # A process that is killed while it says that it is up takes a lock with it, for which
    # the master would wait for ever, deaf to SIGTERM.  It handles that once it is up.
    def look(_number: int, _frame: FrameType | None) -> None:
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            sys.stderr.write("forgekeeper: a worker process died while it started; start the worker again\n")
            sys.stderr.flush()
            os._exit(1)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, boot.total_seconds())


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
