"""Time and the end of a process, as a test wants them."""

import time
from itertools import count

import pytest

JUMP_SECONDS = 1_000.0
"""More than any deadline leaves."""


@pytest.fixture
def jump(monkeypatch):
    """Call it, and the monotonic clock is beyond every deadline."""
    real, jumps = time.monotonic, []
    monkeypatch.setattr(time, "monotonic", lambda: real() + JUMP_SECONDS * len(jumps))
    return lambda: jumps.append(1)


def clock(step):
    """Return a monotonic clock that goes on by *step* each time it is looked at."""
    return count(step, step).__next__


class StandingClock:
    """A monotonic clock that stands still until `go_on` lets a *budget* pass."""

    def __init__(self, budget):
        self._budget = budget.total_seconds()
        self._seconds = 0.0

    def __call__(self):
        return self._seconds

    def go_on(self):
        self._seconds += self._budget


class Crash(Exception):
    """The end of a process, as far as a run or a child can tell."""


def crash():
    raise Crash
