"""The request to shut down, from a supervisor, the master process, the kernel or a person.

Scheduler and exporter handle SIGTERM and Ctrl-C by the queue of `open_request_queue`, in `forgekeeper.cli.serving`.  A
worker process drains (`forgekeeper.platform.worker_shutdown`), and Uvicorn ends the console.
"""

from __future__ import annotations

import signal
import threading
from queue import SimpleQueue
from types import FrameType

requested = threading.Event()
"""Set at the first request.  Then nothing is fetched or started any more, and every run ends at its next safe point."""


def open_request_queue() -> SimpleQueue[None]:
    """Return a queue into which each later SIGTERM and Ctrl-C puts an item.

    An event would not be safe: setting or awaiting it holds its lock for a moment, and a signal that interrupts that
    moment would wait for the lock for ever.
    """
    asked: SimpleQueue[None] = SimpleQueue()

    def put_request(_number: int, _frame: FrameType | None) -> None:
        asked.put(None)

    signal.signal(signal.SIGTERM, put_request)
    signal.signal(signal.SIGINT, put_request)
    return asked
