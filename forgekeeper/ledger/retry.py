"""Every number of retries and deaths that there is: how often what failed is tried again, and when."""

from __future__ import annotations

import random
from datetime import timedelta

MAX_RETRIES = 25
"""The documents' number.  After the last retry a run has failed, and what lies in quarantine waits for a person."""
MAX_LOSSES = 3
"""A run or a child that has taken this many workers down with it is poison."""
LONGEST_RETRY = timedelta(hours=1)
"""A run waits no longer: twenty-five retries at this cap take most of a day, longer than an outage that pages."""
FIRST_WAIT, LONGEST_WAIT = timedelta(minutes=5), timedelta(days=1)
"""So long what lies in quarantine waits after its second failure, and at the longest."""
MOST_IN_RUN = 200
"""A run in which more records fail than that is no run with some bad records: it fails."""
MOST_KNOWN = 1_000
"""So many bad records of a kind are remembered; one more, and the run fails."""

# What failed once is tried again by the next run: most of what goes wrong once does not go wrong twice.
QUARANTINE_UNTIL = f"""
    case when {{failures}} > {MAX_RETRIES} then timestamptz 'infinity' when {{failures}} = 1 then {{at}}
    else {{at}} + least(interval '{FIRST_WAIT.total_seconds()} s' * power(2, least({{failures}}, 20) - 2),
        interval '{LONGEST_WAIT.total_seconds()} s') end
"""
"""When what lies in quarantine after so many failures is tried again; never, where that is a person's to say."""


def backoff(failures: int, *, first: timedelta) -> timedelta:
    """Return how long a run waits after so many earlier failures: *first*, doubled each time, with jitter."""
    jitter = random.uniform(1.0, 1.5)  # noqa: S311, spreads load, guards nothing
    delay: timedelta = first * 2 ** min(failures, 20) * jitter
    return min(delay, LONGEST_RETRY)
