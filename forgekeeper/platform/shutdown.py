"""The one word by which a process is asked to end: from its supervisor, its master, the kernel, or a person."""

from __future__ import annotations

import signal
import threading
from queue import SimpleQueue
from types import FrameType

requested = threading.Event()
"""Set from the first request on: nothing is fetched or started any more, and every run ends at its next safe point."""


def requests() -> SimpleQueue[None]:
    """Return a queue into which each SIGTERM and Ctrl-C puts something, from here on.

    Not an event: whoever sets or awaits one holds its lock for a moment, and a signal that interrupts
    it just then would wait for that lock for ever.
    """
    asked: SimpleQueue[None] = SimpleQueue()

    def received(_number: int, _frame: FrameType | None) -> None:
        asked.put(None)

    signal.signal(signal.SIGTERM, received)
    signal.signal(signal.SIGINT, received)
    return asked
