"""`python -m workers`: dramatiq's own command line, with our log lines from the first one on."""

from __future__ import annotations

import sys

from dramatiq.cli import main, make_argument_parser

from metrics import logs
from metrics.counting import WORKER
from settings.reading import load


def run(arguments: list[str]) -> int:
    """Run dramatiq's master process with *arguments*; return its exit status."""
    settings = load()
    logs.configure(settings.log_format, settings.log_level)
    if settings.metrics_port_worker and not WORKER.in_files:
        # Everything would be counted in memory, and its page be empty.
        sys.stderr.write("forgekeeper: `forgekeeper worker` starts workers; this program lacks what it prepares\n")
        return 2
    # No --path: dramatiq would put the current folder before everything that is installed.
    status: int = main(make_argument_parser().parse_args(["workers", "--path", "--skip-logging", *arguments]))
    return status


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
