"""The command `forgekeeper`."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line and end the process with its exit status."""
    status = run_command()

    from forgekeeper.cli import streams

    streams.end_process(status)


def run_command() -> int:
    """Run the command line and return its exit status.

    An error is one sentence on standard error.
    """
    # Ctrl-C ends the process at once, also during an import and while a server hangs: PostgreSQL rolls uncommitted work
    # back. Commands with an orderly shutdown install handlers of their own.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    from forgekeeper.cli import streams

    streams.install_streams()
    from forgekeeper.cli.commands import run_command_line

    return run_command_line(sys.argv[1:])
