"""When a run that failed is tried again."""

from __future__ import annotations

import random
from datetime import timedelta

MAX_DEATHS = 3
"""A run, or a child, that has taken so many processes down with it is poison."""
LONGEST_RETRY = timedelta(hours=1)
"""Twenty-five retries at this cap take most of a day: longer than an outage that pages."""


def backoff(failures: int, *, first: timedelta) -> timedelta:
    """Return how long to wait after so many earlier failures: *first*, doubled each time, with jitter."""
    jitter = random.uniform(1.0, 1.5)  # noqa: S311, spreads load, guards nothing
    delay: timedelta = first * 2 ** min(failures, 20) * jitter
    return min(delay, LONGEST_RETRY)
