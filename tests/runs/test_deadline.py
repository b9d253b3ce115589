"""A run's budget: how long its pace may wait."""

import threading
import time
from datetime import timedelta

from forgekeeper import shutdown
from forgekeeper.runs.brakes import Deadline

LONG = 1_000
A_MOMENT = timedelta(seconds=0.05)
TOO_LONG = 5.0
"""Seconds that none of these waits may take, and that each would take if it were not cut short."""


def elapsed(act):
    began = time.monotonic()
    act()
    return time.monotonic() - began


def test_pace_waits_as_long_as_the_rows_may_take_but_not_beyond_the_budget():
    assert 0.05 <= elapsed(lambda: Deadline(timedelta(hours=1), pace=100).passed(5)) < TOO_LONG
    assert elapsed(lambda: Deadline(A_MOMENT, pace=100).passed(LONG)) < TOO_LONG


def test_a_request_to_stop_ends_the_wait_for_the_pace():
    stopper = threading.Thread(target=shutdown.requested.set)
    deadline = Deadline(timedelta(hours=1), pace=100, on_progress=stopper.start)
    try:
        waited = elapsed(lambda: deadline.passed(LONG))
        stopper.join()
    finally:
        shutdown.requested.clear()

    assert waited < TOO_LONG
