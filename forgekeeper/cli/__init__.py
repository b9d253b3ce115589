"""The command `forgekeeper`."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line; an error is one sentence on standard error, and an exit status."""
    # Ctrl-C ends the process at once, also during an import and while a server hangs: what is not committed is
    # rolled back.  Commands that end in an orderly way install handlers of their own.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    from forgekeeper.cli import streams

    streams.prepare()
    from forgekeeper.cli.commands import run

    sys.exit(run(sys.argv[1:]))
