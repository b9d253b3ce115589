"""Patch of `multiprocessing.Event`: how a worker process tells Dramatiq's master that it is ready.

Dramatiq 2.2.1 (`dramatiq/cli.py`) makes an event of CPython's (3.11) for each process.  That is made of locks,
and its two sides wait for each other: when one of them is killed in the middle, the other waits for ever, deaf to
SIGTERM.  It may go when `test_a_master_waits_for_ever_for_a_process_that_was_killed_while_it_said_it_was_ready` in
`tests/engine/test_patches.py` fails.
"""

from __future__ import annotations

import multiprocessing


class Ready:
    """What Dramatiq uses of `multiprocessing.Event`, as a pipe, which waits for nobody."""

    def __init__(self) -> None:
        self._heard, self._said = multiprocessing.Pipe(duplex=False)

    def set(self) -> None:
        """Say it, whether anybody listens or not."""
        self._said.send_bytes(b"ready")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it, up to *timeout* seconds; return whether it was said."""
        return self._heard.poll(timeout)


def install() -> None:
    """Let Dramatiq's master, which this process is to become, use it."""
    multiprocessing.Event = Ready  # type: ignore[assignment]
