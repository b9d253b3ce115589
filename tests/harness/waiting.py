"""Poll for a condition, longer on a busy machine."""

import os
import time
from collections.abc import Callable

POLL_INTERVAL = 0.01
MAX_TIMEOUT_FACTOR = 4.0
"""Limit for a busy machine: work that takes longer than this many times its limit hangs."""


def scale_timeout(limit: float) -> float:
    """Return the limit, in seconds, scaled by the load of this machine."""
    busy = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return limit * min(max(1.0, busy), MAX_TIMEOUT_FACTOR)


def wait_until(condition: Callable[[], bool], limit: float) -> bool:
    """Return True as soon as *condition* holds, False if it did not within *limit* seconds, scaled by the load."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > limit and time.monotonic() - began > scale_timeout(limit):
            return False
        time.sleep(POLL_INTERVAL)
    return True
