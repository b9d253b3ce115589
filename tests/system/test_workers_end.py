"""Workers that are told to end, by their master or with it, once or twice, beside bare Dramatiq."""

import time
from math import inf
from statistics import median

import pytest

from tests.harness.machine import Held
from tests.harness.waiting import wait_until

from .stock_processes import both, eventually, fill, lifetimes, start

THREADS = 12
TIMES = (1, 2)
"""How often each of the workers is told."""
PROMISED = 2.0
"""Seconds until what an ending worker has only prefetched starts elsewhere."""
SOON = 15.0
"""More than enough for everything that ends well, on a busy machine too."""


@pytest.fixture
def sides(database, urls, tmp_path):
    with both(urls.redis, tmp_path) as sides:
        yield sides


@pytest.mark.parametrize("group", [False, True], ids=["the master", "all its processes too"])
def test_what_runs_is_finished_and_what_does_not_starts_elsewhere_whoever_is_told_to_end(sides, go, outcome, group):
    at_work = len(TIMES) * THREADS
    keys = [str(number) for number in range(2 * at_work)]
    start(sides, masters=len(TIMES), threads=THREADS)
    fill(sides, keys, go, at_work=at_work)
    running = [{note.key: note.pid for note in side.notes("began")} for side in sides]
    prefetched = [[key for key in keys if key not in held] for held in running]
    start(sides, masters=1, threads=at_work)

    ours, stock = sides
    held_up = Held(lambda: [master.process.pid for master in ours.masters])
    told_at = time.monotonic()
    tell(sides, group=group)
    # What runs lasts until what was prefetched has had its chance.
    wait_until(lambda: inf not in ours.waits(prefetched[0], told_at), SOON)
    busy = held_up.seconds()
    go.touch()
    ended = lifetimes([master.process.pid for side in sides for master in told(side)], time.monotonic(), SOON)
    wait_until(lambda: all(len(side.done()) == len(keys) for side in sides), SOON)

    waits = [side.waits(ids, told_at) for side, ids in zip(sides, prefetched, strict=True)]
    for side, held, late in zip(sides, running, waits, strict=True):
        facts = {"injected": at_work, "duplicates": side.doubled(), "stock": side is stock}
        seconds = [ended[master.process.pid] for master in told(side)]
        outcome(6, violations=len(unfinished(side, held)), recovery=seconds, **facts)
        outcome(41, violations=sum(wait > PROMISED for wait in late), recovery=late, **facts)
    assert (len(running[0]), unfinished(ours, running[0])) == (at_work, [])
    assert [master.process.poll() for master in told(ours)] == [0] * len(TIMES)
    # No more than the machine has held them up; what is not handed back waits for as long as what runs.
    assert median(waits[0]) <= PROMISED + busy
    assert inf not in waits[0]
    assert ours.done() == dict.fromkeys(keys, 1)


def told(side):
    """The masters that are told to end: the last one takes over."""
    return side.masters[: len(TIMES)]


def tell(sides, *, group):
    """Tell each master as often as is its turn; the second time when all have heard the first."""
    for number in range(max(TIMES)):
        for side in sides:
            for times, master in zip(TIMES, told(side), strict=True):
                if number < times:
                    master.tell(group=group)
        eventually(lambda: all(master.has_heard(side.heard) for side in sides for master in told(side)))


def unfinished(side, held):
    """Return which messages were not done by the process that was at them."""
    done = {(note.key, note.pid) for note in side.notes("done")}
    return [key for key, pid in held.items() if (key, pid) not in done]
