import os
import time

import pytest

from forgekeeper.embedded.waiting import wait_until

LIMIT = 0.2


@pytest.fixture
def crowded(monkeypatch):
    """Let the machine be as crowded as is said: so many processes for each processor."""
    processors = len(os.sched_getaffinity(0))

    def crowd(processes):
        monkeypatch.setattr(os, "getloadavg", lambda: (processes * processors, 0.0, 0.0))

    return crowd


def waited():
    began = time.monotonic()
    assert not wait_until(lambda: False, LIMIT)
    return time.monotonic() - began


def test_on_a_machine_that_is_idle_a_limit_is_what_it_says(crowded):
    crowded(0)

    # It may not be idle.
    assert any(LIMIT <= waited() < 2 * LIMIT for _ in range(10))


def test_on_a_crowded_machine_there_is_more_time(crowded):
    crowded(3)

    assert waited() >= 3 * LIMIT


def test_what_hangs_is_not_waited_for_for_ever_on_the_most_crowded_machine(crowded):
    crowded(1000)

    assert any(waited() < 5 * LIMIT for _ in range(10))
