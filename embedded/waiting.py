"""Wait for a condition that nothing announces."""

import time
from collections.abc import Callable

POLL_INTERVAL = 0.01


def wait_until(condition: Callable[[], bool], limit: float) -> bool:
    """Return True as soon as *condition* holds, False if it did not within *limit* seconds."""
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_INTERVAL)
    return True
