"""Workers that are killed, by somebody or by their messages, beside bare Dramatiq's on the same Redis."""

import os
import signal
import time
from collections import Counter
from functools import partial
from math import inf

import pytest
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker

from forgekeeper.connections import client
from forgekeeper.delivery.broker import broker
from forgekeeper.settings import PREFIX
from tests.harness.waiting import wait_until
from tests.system.service import Service

from .actors import NOTES, QUEUE, URL

LIMIT = 60.0
CAP = 27.0
"""What has not begun by then counts as never begun."""
DEATHS = 3
READY = "Worker process is ready for action."


class Side:
    """Workers of one kind, the messages they get and what comes of these."""

    def __init__(self, name, broker, folder):
        self.name, self.masters = name, []
        self.key = f"{broker.namespace}:{QUEUE}"
        self._broker, self._folder, self._file = broker, folder, folder / f"{name}.notes"

    def start(self, *, threads, prefetch=None):
        """Start a master of one process, which counts as dead after a second."""
        arguments = ("--processes", "1", "--threads", str(threads), "--queues", QUEUE)
        environment = {NOTES: str(self._file), **self.environment(threads)}
        environment |= {"dramatiq_queue_prefetch": str(prefetch)} if prefetch else {}
        name = f"{self.name}{len(self.masters)}"
        self.masters.append(Service(name, (*self.arguments, *arguments), self._folder, environment, self.module))
        self.masters[-1].start()

    def ready(self):
        return all(any(READY in line for line in master.last_lines(1000)) for master in self.masters)

    def send(self, actor, key, *args):
        """Put a message in that has *key* for its id."""
        self._broker.enqueue(Message(QUEUE, actor, (key, *args), {}, {}, key))

    def notes(self, what, since=0.0):
        """List the keys that were written down from that moment on, each with when, in their order."""
        # The last line may be half written.
        whole = self._file.read_text().rpartition("\n")[0] if self._file.exists() else ""
        found = [(key, float(at)) for kind, key, at in map(str.split, whole.splitlines()) if kind == what]
        return [(key, at) for key, at in found if at >= since]

    def done(self):
        """List what was done, each as often as it was."""
        return sorted(key for key, _ in self.notes("done"))

    def waits(self, keys, since):
        """Say of each message how long after that moment it began; `inf` if it did not."""
        first = {key: at - since for key, at in reversed(self.notes("began", since))}
        return [first.get(key, inf) for key in keys]

    def runs(self, key):
        """Count how often it was begun."""
        return Counter(began for began, _ in self.notes("began"))[key]

    def nothing_is_left(self):
        """Say whether each message has come to its end."""
        return not any(client.exists(f"{self.key}{end}") for end in ("", ".msgs"))


class Ours(Side):
    """Forgekeeper's workers."""

    arguments, module = (), "tests.system.soak.actors"

    def environment(self, threads):
        options = {"worker_threads": threads, "log_format": "json", "dead_after": 1}
        return {PREFIX + name.upper(): str(value) for name, value in options.items()}


class Stock(Side):
    """Bare Dramatiq's workers."""

    arguments, module = ("tests.system.soak.actors",), "dramatiq"

    def environment(self, _threads):
        return {URL: os.environ[f"{PREFIX}REDIS_URL"]}


@pytest.fixture
def sides(database, urls, tmp_path):
    bare = RedisBroker(url=urls.redis)
    bare.declare_queue(QUEUE)
    sides = Ours("ours", broker, tmp_path), Stock("stock", bare, tmp_path)
    yield sides
    for side in sides:
        for master in side.masters:
            master.kill()
    bare.client.connection_pool.disconnect()


def test_messages_of_killed_processes_run_again(sides, tmp_path, outcome):
    keys, go = [str(number) for number in range(4)], tmp_path / "go"
    for side in sides:
        side.start(threads=2)
        for key in keys:
            side.send("hold", key, str(go))
    assert wait_until(lambda: all(len(side.notes("began")) == 2 and not client.llen(side.key) for side in sides), LIMIT)
    victims = [child for side in sides for child in side.masters[0].children]
    for side in sides:
        side.start(threads=len(keys))
    assert wait_until(lambda: all(side.ready() for side in sides), LIMIT)

    killed_at = time.monotonic()
    for process in victims:
        os.kill(process, signal.SIGKILL)
    wait_until(lambda: all(inf not in side.waits(keys, killed_at) for side in sides), CAP)
    again = wait_until(lambda: inf not in sides[0].waits(keys, killed_at), LIMIT)
    waits = [side.waits(keys, killed_at) for side in sides]
    go.touch()
    done = wait_until(lambda: sides[0].done() == keys, LIMIT)

    for side, seconds in zip(sides, waits, strict=True):
        facts = {"duplicates": len(side.done()) - len(set(side.done())), "stock": side is not sides[0]}
        outcome(1, injected=len(keys), violations=sum(wait > CAP for wait in seconds), recovery=seconds, **facts)
    assert (again, done) == (True, True)


def test_a_message_that_kills_its_process_runs_three_times_and_its_neighbours_are_done(sides, outcome):
    neighbours = [str(number) for number in range(5)]

    def ended(side):
        for master in side.masters:
            master.restart_if_dead()
        return (side.nothing_is_left() or side.runs("bad") > DEATHS) and set(side.done()) == set(neighbours)

    # One after the other: both are busy with dying.
    for side, limit in zip(sides, (2 * LIMIT, CAP / 2), strict=True):
        side.send("kill", "bad")
        for key in neighbours:
            side.send("note", key)
        # One thread: all neighbours lie prefetched behind the one that kills.
        side.start(threads=1, prefetch=1 + len(neighbours))
        wait_until(partial(ended, side), limit)

    for side in sides:
        waits = side.waits(neighbours, side.notes("began")[0][1])
        violations = max(0, side.runs("bad") - DEATHS) + waits.count(inf)
        outcome(23, injected=1, violations=violations, recovery=waits, stock=side is not sides[0])
    assert (sides[0].runs("bad"), sides[0].done()) == (DEATHS, neighbours)
