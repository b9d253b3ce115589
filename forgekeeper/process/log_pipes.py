"""Patch of `dramatiq.cli.watch_logs`: a master ends with the last of its processes, and with all that they have said.

That of Dramatiq 2.2.1 waits for a pipe of the master's own, too, which nobody closes: it takes up to a second longer.
And what a process said last is lost where the master learns of its end first.  It may go when
`test_processes_that_have_ended_are_not_waited_for` in `tests/engine/test_patches.py` fails for Dramatiq's.
"""

from __future__ import annotations

from contextlib import suppress
from multiprocessing.connection import Connection, wait
from threading import Event

from dramatiq import cli
from dramatiq.compat import file_or_stderr

LOOK = 1.0
"""Seconds between two looks whether the master is to end: somebody else may keep a pipe open."""


def watch_logs(filename: str | None, pipes: list[Connection], stop: Event) -> None:
    """Write what comes out of the pipes to a file, stderr without a name, until all are closed or *stop* is set.

    The first one is the master's own, which is passed over: its log lines go another way.
    """
    _own, *left = pipes
    with file_or_stderr(filename) as file:
        while left:
            ends = stop.is_set()
            ready = wait(left, 0 if ends else LOOK)
            if ends and not ready:
                return
            for reader in [reader for reader in left if reader in ready]:
                try:
                    said = reader.recv_bytes()
                except (EOFError, OSError):
                    left.remove(reader)
                else:
                    with suppress(OSError):
                        file.write(said.decode(errors="replace"))
                        file.flush()


def install() -> None:
    """Let Dramatiq's master, which this process is to become, use it."""
    cli.watch_logs = watch_logs
