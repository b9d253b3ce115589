"""The request to shut down, from a supervisor, the master process, the kernel or a person."""

from __future__ import annotations

import signal
import threading
from queue import SimpleQueue
from types import FrameType

requested = threading.Event()
"""Set at the first request.  Then nothing is fetched or started any more, and every run ends at its next safe point."""


def requests() -> SimpleQueue[None]:
    """Return a queue into which each later SIGTERM and Ctrl-C puts an item.

    An event would not be safe: setting or awaiting it holds its lock for a moment, and a signal that interrupts that
    moment would wait for the lock for ever.
    """
    asked: SimpleQueue[None] = SimpleQueue()

    def received(_number: int, _frame: FrameType | None) -> None:
        asked.put(None)

    signal.signal(signal.SIGTERM, received)
    signal.signal(signal.SIGINT, received)
    return asked
