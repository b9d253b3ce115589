"""Limits and delays of retries: of runs, of quarantined records and children, of work that kills workers.

The first delay of a run is a setting, ``FORGEKEEPER_RETRY_AFTER``.
"""

from __future__ import annotations

import random
from datetime import timedelta

MAX_RETRIES = 25
"""The documents' number.  After the last retry a run fails, and a quarantined record or child waits for a person."""
MAX_LOSSES = 3
"""A run or child that has killed this many workers is poison."""
MAX_RETRY_DELAY = timedelta(hours=1)
"""Maximum wait of a run: 25 retries with it take most of a day, longer than an outage that pages somebody."""
FIRST_QUARANTINE_WAIT, MAX_QUARANTINE_WAIT = timedelta(minutes=5), timedelta(days=1)
"""Pause of a quarantined record or child after its second failure, and upper limit of the pause."""
MAX_FAILED_RECORDS_IN_RUN = 200
"""A run with more failed records than this fails as a whole."""
MAX_BAD_RECORDS_OF_KIND = 1_000
"""Maximum bad records of a kind in quarantine; with one more, the run fails."""

# The next run retries a first failure: most failures do not happen twice.
QUARANTINE_UNTIL = f"""
    case when {{failures}} > {MAX_RETRIES} then timestamptz 'infinity' when {{failures}} = 1 then {{at}}
    else {{at}} + least(interval '{FIRST_QUARANTINE_WAIT.total_seconds()} s' * power(2, least({{failures}}, 20) - 2),
        interval '{MAX_QUARANTINE_WAIT.total_seconds()} s') end
"""
"""SQL: when a quarantined record or child is retried after *failures*; infinity if a person has to decide."""


def compute_backoff(failures: int, *, first: timedelta) -> timedelta:
    """Return how long a run waits after *failures* earlier failures.

    That is *first*, doubled each time, with jitter.
    """
    jitter = random.uniform(1.0, 1.5)  # noqa: S311, spreads load, guards nothing
    delay: timedelta = first * 2 ** min(failures, 20) * jitter
    return min(delay, MAX_RETRY_DELAY)
