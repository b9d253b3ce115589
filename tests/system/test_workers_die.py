"""Worker processes and masters that are killed, and messages that kill them, beside bare Dramatiq."""

import os
import signal
import time
from collections import Counter
from functools import partial
from math import inf
from statistics import median

import pytest
from forgekeeper.delivery.deliveries import MAX_DEATHS

from forgekeeper.connections import client
from tests.harness.waiting import wait_until

from .stock_processes import LIMIT, both, fill, lifetimes, start

PROMISED = 20.0
"""Seconds until a killed worker's messages run again, at the default settings."""
CAP = 27.0
"""What has not been done by then counts as never done; of stock's short time-outs, by half of it."""
SOON = 15.0
"""More than enough for everything that ends well, on a busy machine too."""
SHORT = {"dead_after": 1}
STOCK_SHORT = {"heartbeat_timeout": 1000, "maintenance_chance": 1_000_000}
"""As short for bare Dramatiq, which by default would take minutes to die three times."""


@pytest.fixture
def sides(database, urls, tmp_path):
    with both(urls.redis, tmp_path) as sides:
        yield sides


def test_messages_of_killed_processes_run_again_within_twenty_seconds_by_default(sides, go, outcome):
    masters, threads = 4, 3
    # As many again as are at work are prefetched.
    keys = [str(number) for number in range(2 * masters * threads)]
    for _ in range(masters):
        # One after the other: their signs of life are to be of different age when they are killed.
        start(sides, masters=1, threads=threads)
    fill(sides, keys, go, at_work=masters * threads)
    victims = [child for side in sides for master in side.masters for child in master.children]
    start(sides, masters=1, threads=len(keys))

    killed_at = time.monotonic()
    for process in victims:
        os.kill(process, signal.SIGKILL)
    wait_until(lambda: all(inf not in side.waits(keys, killed_at) for side in sides), CAP)
    waits = [side.waits(keys, killed_at) for side in sides]
    go.touch()
    ours, stock = sides
    done = wait_until(lambda: len(ours.done()) == len(keys), LIMIT)

    for side, seconds in zip(sides, waits, strict=True):
        late = sum(wait > PROMISED for wait in seconds)
        facts = {"duplicates": side.doubled(), "stock": side is stock}
        outcome(1, injected=len(keys), violations=late, recovery=seconds, **facts)
    assert len(victims) == 2 * masters
    # A busy machine may hold some of them up.
    assert median(waits[0]) <= PROMISED
    assert inf not in waits[0]
    assert (done, ours.done()) == (True, dict.fromkeys(keys, 1))


def test_a_message_that_kills_its_process_runs_three_times_and_its_neighbours_are_done(sides, outcome):
    ours, stock = sides
    poison, neighbours = ["bad1", "bad2"], [str(number) for number in range(10)]

    def ended(side):
        side.restart_the_dead()
        over = len(reasons(side)) == len(poison) or max(runs(side, poison).values(), default=0) > MAX_DEATHS
        return over and set(side.done()) == set(neighbours)

    # One after the other: both are busy with dying.
    for side, short, limit in ((ours, SHORT, 2 * LIMIT), (stock, STOCK_SHORT, CAP / 2)):
        for key in poison:
            side.send("kill", key)
        for key in neighbours:
            side.send("note", key)
        # One thread: all neighbours lie prefetched behind the one that kills.
        side.start(threads=1, prefetch=len(poison + neighbours), **short)
        wait_until(partial(ended, side), limit)

    for side in sides:
        waits = side.waits(neighbours, side.notes("began")[0].at)
        violations = sum(max(0, count - MAX_DEATHS) for count in runs(side, poison).values()) + waits.count(inf)
        facts = {"duplicates": side.doubled(), "stock": side is stock}
        outcome(23, injected=len(poison), violations=violations, recovery=waits, **facts)
    assert reasons(ours) == dict.fromkeys(poison, "poison")
    assert runs(ours, poison) == dict.fromkeys(poison, MAX_DEATHS)
    assert ours.done() == dict.fromkeys(neighbours, 1)


def runs(side, keys):
    return Counter(note.key for note in side.notes("began") if note.key in keys)


def reasons(side):
    """Say why messages were given up."""
    return {key.decode(): reason.decode() for key, reason in client.hgetall(f"{side.key}.XQ.reasons").items()}


def test_a_master_that_is_killed_leaves_no_process_and_its_messages_are_done(sides, go, outcome):
    masters, processes, threads = 2, 2, 2
    at_work = masters * processes * threads
    keys = [str(number) for number in range(2 * at_work)]
    start(sides, masters=masters, processes=processes, threads=threads)
    fill(sides, keys, go, at_work=at_work)
    children = [[child for master in side.masters for child in master.children] for side in sides]
    victims = [master.process for side in sides for master in side.masters]
    start(sides, masters=1, threads=at_work)

    killed_at = time.monotonic()
    for process in victims:
        process.kill()
    ours, stock = sides
    elsewhere = wait_until(lambda: len(ours.notes("began", killed_at)) == at_work, SOON)
    # What runs lasts until here.
    go.touch()
    lived = lifetimes([child for pids in children for child in pids], time.monotonic(), SOON)
    done = wait_until(lambda: len(ours.done()) == len(keys), SOON)

    for side, pids in zip(sides, children, strict=True):
        seconds = [lived[pid] for pid in pids]
        facts = {"duplicates": side.doubled(), "stock": side is stock}
        outcome(5, injected=masters, violations=seconds.count(inf), recovery=seconds, **facts)
    assert [pid for pid in children[0] if lived[pid] == inf] == []
    assert elsewhere, "what was prefetched was not begun by the other worker"
    assert (done, ours.done()) == (True, dict.fromkeys(keys, 1))
