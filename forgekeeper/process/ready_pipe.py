"""The word of a worker process to its master that it is up."""

from __future__ import annotations

import multiprocessing


class Word:
    """Stands in for `multiprocessing.Event`, of which it has what Dramatiq uses.

    That one is made of locks, and its two sides wait for each other: of a process and a
    master, whichever is not killed at that moment waits for the other for ever, deaf to
    SIGTERM.  A pipe waits for nobody.
    """

    def __init__(self) -> None:
        self._heard, self._said = multiprocessing.Pipe(duplex=False)

    def set(self) -> None:
        """Give the word, whether anybody listens or not."""
        self._said.send_bytes(b"up")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it, up to *timeout* seconds; say whether it was given."""
        return self._heard.poll(timeout)
