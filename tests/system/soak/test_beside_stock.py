"""Workers that are killed, asked to end, killed by their messages or lose their Redis, beside bare Dramatiq's."""

import os
import signal
import time
from functools import partial
from math import inf

import pytest

from tests.harness.waiting import wait_until

from .stock import LIMIT, Ours, Stock, cleaned_up, fill, lifetimes, start

CAP = 27.0
"""What has not begun by then counts as never begun."""
SOON = 15.0
"""More than enough for everything that ends well, on a busy machine too."""
DEATHS = 3
SHORT = {"dead_after": 1}
STOCK_SHORT = {"heartbeat_timeout": 1000, "maintenance_chance": 1_000_000}
"""As short for bare Dramatiq, which by default would take minutes to die three times."""


@pytest.fixture
def sides(database, urls, tmp_path):
    with cleaned_up(Ours(urls.redis, tmp_path), Stock(urls.redis, tmp_path)) as sides:
        yield sides


def test_messages_of_killed_processes_run_again_at_the_default_settings(sides, go, outcome):
    keys = [str(number) for number in range(8)]
    start(sides, masters=2, threads=2)
    fill(sides, keys, go, at_work=4)
    victims = [child for side in sides for master in side.masters for child in master.children]
    start(sides, masters=1, threads=len(keys))

    killed_at = time.monotonic()
    for process in victims:
        os.kill(process, signal.SIGKILL)
    ours = sides[0]
    wait_until(lambda: all(inf not in side.waits(keys, killed_at) for side in sides), CAP)
    again = wait_until(lambda: inf not in ours.waits(keys, killed_at), LIMIT)
    waits = [side.waits(keys, killed_at) for side in sides]
    go.touch()
    done = wait_until(lambda: ours.done() == keys, LIMIT)

    for side, seconds in zip(sides, waits, strict=True):
        facts = {"duplicates": side.doubled(), "stock": side is not ours}
        outcome(1, injected=len(keys), violations=sum(wait > CAP for wait in seconds), recovery=seconds, **facts)
    assert (again, done) == (True, True)


def test_a_message_that_kills_its_process_runs_three_times_and_its_neighbours_are_done(sides, outcome):
    ours, stock = sides
    poison, neighbours = ["bad"], [str(number) for number in range(5)]

    def ended(side):
        for master in side.masters:
            master.restart_if_dead()
        over = side.nothing_is_left() or max(side.runs(poison).values(), default=0) > DEATHS
        return over and set(side.done()) == set(neighbours)

    # One after the other: both are busy with dying.
    for side, short, limit in ((ours, SHORT, 2 * LIMIT), (stock, STOCK_SHORT, CAP / 2)):
        side.send("kill", *poison)
        for key in neighbours:
            side.send("note", key)
        # One thread: all neighbours lie prefetched behind the one that kills.
        side.start(threads=1, prefetch=len(poison + neighbours), **short)
        wait_until(partial(ended, side), limit)

    for side in sides:
        waits = side.waits(neighbours, side.notes("began")[0].at)
        violations = sum(max(0, count - DEATHS) for count in side.runs(poison).values()) + waits.count(inf)
        facts = {"duplicates": side.doubled(), "stock": side is stock}
        outcome(23, injected=1, violations=violations, recovery=waits, **facts)
    assert (ours.runs(poison)["bad"], ours.done()) == (DEATHS, neighbours)


def test_a_master_that_is_killed_leaves_no_process_and_its_messages_are_done(sides, go, outcome):
    keys = [str(number) for number in range(8)]
    start(sides, masters=1, processes=2, threads=2)
    fill(sides, keys, go, at_work=4)
    children = [side.masters[0].children for side in sides]
    victims = [side.masters[0].process for side in sides]
    start(sides, masters=1, threads=len(keys))

    killed_at = time.monotonic()
    for process in victims:
        process.kill()
    ours = sides[0]
    # What runs lasts until the other worker has had its chance.
    wait_until(lambda: len(ours.notes("began", killed_at)) == len(keys), SOON)
    go.touch()
    lived = lifetimes([child for pids in children for child in pids], time.monotonic(), SOON)
    done = wait_until(lambda: set(ours.done()) == set(keys), LIMIT)

    for side, pids in zip(sides, children, strict=True):
        seconds = [lived[pid] for pid in pids]
        facts = {"duplicates": side.doubled(), "stock": side is not ours}
        outcome(5, injected=1, violations=seconds.count(inf), recovery=seconds, **facts)
    assert [pid for pid in children[0] if lived[pid] == inf] == []
    assert done


@pytest.mark.parametrize("group", [False, True], ids=["the master", "all its processes too"])
def test_what_runs_is_finished_and_what_does_not_starts_elsewhere_when_a_worker_is_asked_to_end(
    sides, go, outcome, group
):
    threads = 4
    keys = [str(number) for number in range(2 * threads)]
    start(sides, masters=1, threads=threads)
    fill(sides, keys, go, at_work=threads)
    running = [{note.key: note.pid for note in side.notes("began")} for side in sides]
    start(sides, masters=1, threads=threads)

    ours, asked_at = sides[0], time.monotonic()
    prefetched = [key for key in keys if key not in running[0]]
    for side in sides:
        side.masters[0].ask_to_end(group=group)
    # What runs lasts until what was prefetched has had its chance.
    wait_until(lambda: inf not in ours.waits(prefetched, asked_at), SOON)
    go.touch()
    ended = lifetimes([side.masters[0].process.pid for side in sides], time.monotonic(), SOON)
    wait_until(lambda: all(len(side.done()) >= len(keys) for side in sides), SOON)

    for side, held in zip(sides, running, strict=True):
        facts = {"injected": threads, "duplicates": side.doubled(), "stock": side is not ours}
        recovery = [ended[side.masters[0].process.pid]]
        outcome(6, violations=len(unfinished(side, held)), recovery=recovery, **facts)
        late = side.waits([key for key in keys if key not in held], asked_at)
        outcome(41, violations=late.count(inf), recovery=late, **facts)
    assert unfinished(ours, running[0]) == []
    assert ours.masters[0].process.poll() == 0
    assert ours.done() == keys


def unfinished(side, held):
    """Return which messages were not done by the process that worked on them."""
    done = {(note.key, note.pid) for note in side.notes("done")}
    return [key for key, pid in held.items() if (key, pid) not in done]
