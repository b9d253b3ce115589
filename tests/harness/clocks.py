"""Clocks that a test controls, and the simulated end of a process."""

import time
from itertools import count

import pytest

JUMP_SECONDS = 1_000.0
"""More seconds than any deadline allows."""


@pytest.fixture
def jump(monkeypatch):
    """Return a function that moves the monotonic clock beyond every deadline."""
    real, jumps = time.monotonic, []
    monkeypatch.setattr(time, "monotonic", lambda: real() + JUMP_SECONDS * len(jumps))
    return lambda: jumps.append(1)


def clock(step):
    """Return a monotonic clock that advances by *step* seconds at each call."""
    return count(step, step).__next__


class StandingClock:
    """A monotonic clock that only `exceed_budget` advances, by the *budget*."""

    def __init__(self, budget):
        self._budget = budget.total_seconds()
        self._seconds = 0.0

    def __call__(self):
        return self._seconds

    def exceed_budget(self):
        self._seconds += self._budget


class Crash(Exception):
    """Simulates the end of the process inside a run or child."""


def crash():
    raise Crash
