"""A run's budget, with a clock that the test turns."""

import threading
import time
from datetime import timedelta

import pytest

from forgekeeper import shutdown
from forgekeeper.runs.deadline import Deadline

BUDGET = timedelta(seconds=30)
LONG = 1_000
A_MOMENT = 0.05
TOO_LONG = 5.0
"""Seconds that none of these waits may take, and that each would take if it were not cut short."""


class Clock:
    """A monotonic clock that stands still until it is set; *when_asked* happens at each look at it."""

    def __init__(self, when_asked=lambda: None):
        self.seconds = 5_000.0
        self._when_asked = when_asked

    def __call__(self):
        self._when_asked()
        return self.seconds


@pytest.fixture(autouse=True)
def _nobody_asks_to_stop():
    shutdown.requested.clear()
    yield
    shutdown.requested.clear()


@pytest.fixture
def clock():
    return Clock()


def elapsed(act):
    began = time.monotonic()
    act()
    return time.monotonic() - began


def test_a_deadline_has_passed_at_its_exact_end(clock):
    deadline = Deadline(BUDGET, clock=clock)
    clock.seconds += 30

    assert deadline.passed()


def test_pace_waits_as_long_as_the_rows_may_take(clock):
    deadline = Deadline(BUDGET, clock=clock, pace=100)

    waited = elapsed(lambda: deadline.passed(5))

    assert A_MOMENT <= waited < TOO_LONG


def test_pace_does_not_wait_beyond_the_budget(clock):
    deadline = Deadline(BUDGET, clock=clock, pace=100)
    clock.seconds += 30 - A_MOMENT

    waited = elapsed(lambda: deadline.passed(LONG))

    assert A_MOMENT * 0.9 <= waited < TOO_LONG


def test_a_request_to_stop_ends_the_wait_for_the_pace():
    # The clock is looked at right before the wait.
    stopper = threading.Thread(target=shutdown.requested.set)
    begin = threading.Event()
    clock = Clock(lambda: begin.is_set() and not stopper.ident and stopper.start())
    deadline = Deadline(timedelta(hours=1), clock=clock, pace=100)
    begin.set()

    waited = elapsed(lambda: deadline.passed(LONG))

    stopper.join()
    assert waited < TOO_LONG
