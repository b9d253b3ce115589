"""What is fetched and waits for a thread: Dramatiq's queue, from which a thread may take its next message early."""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, PriorityQueue
from threading import get_ident
from typing import Any

IDLE = 5.0
"""Seconds for which an idle thread waits, however often it would ask: it has nothing to look after but its end."""


class WorkQueue(PriorityQueue[Any]):
    """Lets a thread that ends a message take its next one first, so that both steps are one script.

    What a thread took is what it gets next, and nobody else does, but for whoever empties the queue when the threads
    have ended.  Worth a script, 100 of a message's 330 microseconds in Python (`python -m benchmarks messages`).
    """

    def __init__(self) -> None:
        super().__init__()
        self._taken: dict[int, Any] = {}
        self._ends = False

    def end(self) -> None:
        """Let no thread wait any more: they are to end."""
        with self.not_empty:
            self._ends = True
            self.not_empty.notify_all()

    def take(self, queue: str) -> Any | None:
        """Take the message that this thread is to work on next; None where there is none, or one of another queue."""
        with self.mutex:
            if not self.queue or self.queue[0].message.queue_name != queue:
                return None
            item = self._taken[get_ident()] = self._get()
        return item.message

    def put_back(self) -> None:
        """Let any thread have what this one took, unless the queue has been emptied."""
        taken = self._taken.pop(get_ident(), None)
        if taken is not None:
            self.put(taken)
            self.task_done()  # it has been put in twice

    def get(self, block: bool = True, timeout: float | None = None) -> Any:  # noqa: FBT001, FBT002, Python's signature
        """Return what this thread took, or the next of all; an idle thread may wait for `IDLE` more, up to its end."""
        taken = self._taken.pop(get_ident(), None)
        if taken is not None:
            return taken
        if block:
            with self.not_empty:
                self.not_empty.wait_for(lambda: self._ends or self._qsize() > 0, IDLE)
        try:
            return super().get(block and not self._ends, timeout)
        except Empty:
            if not block:
                # Asked by whoever empties it; a thread that was told to end may have taken something just before.
                with suppress(KeyError):
                    return self._taken.popitem()[1]
            raise
