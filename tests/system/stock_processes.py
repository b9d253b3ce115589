"""Ours and stock: workers of forgekeeper's and of bare Dramatiq, which do the same slow work side by side."""

import os
import signal
import time
from collections import Counter
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from typing import NamedTuple

from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker
from forgekeeper.delivery.enqueue_unique import enqueue_unique

from forgekeeper.connections import client
from forgekeeper.delivery.broker import broker
from forgekeeper.settings import PREFIX
from tests.harness.waiting import wait_until

from .service import Service
from .slow_actors import NOTES
from .slow_work import QUEUE
from .stock_slow_actors import NOTES as STOCK_NOTES
from .stock_slow_actors import OPTIONS, URL

LIMIT = 60.0
READY = "Worker process is ready for action."
PREFETCH = "dramatiq_queue_prefetch"


class Note(NamedTuple):
    """What an actor told: that it began or was done, with which message, in which process, when."""

    what: str
    key: str
    pid: int
    at: float


class Master(Service):
    """A master with its worker processes."""

    @property
    def log(self):
        return (self.folder / f"{self.name}-{self.lives}.log").read_text(errors="replace")

    def ready(self, processes):
        """Say whether all its processes are up."""
        return self.log.count(READY) == processes

    def tell(self, *, group):
        """Send SIGTERM to the master, or to it and all its processes."""
        if group:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)
        else:
            self.process.terminate()

    def has_heard(self, line):
        """Say whether a process has written *line*, or all have ended without a word."""
        return line in self.log or self.process.poll() is not None


class Side:
    """Masters of one kind, the messages they get and what comes of these."""

    def __init__(self, name, module, *, notes, key, heard, folder):
        self.masters = []
        self.key = key
        self.heard = heard
        self._name = name
        self._module = module
        self._notes = notes
        self._folder = folder

    def start(self, *, processes=1, threads, prefetch=None, **options):
        """Start a master, with settings or broker options that are not the defaults."""
        environment = self.environment(threads, options) | ({PREFETCH: str(prefetch)} if prefetch else {})
        arguments = (*self.arguments, "--processes", str(processes), "--threads", str(threads), "--queues", QUEUE)
        name = f"{self._name}{len(self.masters)}"
        self.masters.append(Master(name, arguments, self._folder, environment, module=self._module))
        self.masters[-1].start()
        return self.masters[-1]

    def restart_the_dead(self):
        """Do what a supervisor does."""
        for master in self.masters:
            master.restart_if_dead()

    def notes(self, what, since=0.0):
        """List what was told of from that moment on, in its order."""
        notes = [line.decode().split() for line in client.lrange(self._notes, 0, -1)]
        found = [Note(kind, key, int(pid), float(at)) for kind, key, pid, at in notes]
        return [note for note in found if note.what == what and note.at >= since]

    def done(self):
        """Count how often each message was done."""
        return Counter(note.key for note in self.notes("done"))

    def doubled(self):
        """Count how often a message was done that had been done before."""
        return sum(count - 1 for count in self.done().values())

    def waits(self, keys, since):
        """Say of each message how long after that moment it first began, `inf` if it did not."""
        first = {note.key: note.at - since for note in reversed(self.notes("began", since))}
        return [first.get(key, inf) for key in keys]

    def nothing_waits(self):
        """Say whether workers have fetched everything."""
        return client.llen(self.key) == 0

    def clean_up(self):
        for master in self.masters:
            master.kill()


class Ours(Side):
    """Forgekeeper's workers."""

    arguments = ()

    def __init__(self, folder):
        key = f"{broker.namespace}:{QUEUE}"
        super().__init__(
            "ours", "tests.system.slow_actors", notes=NOTES, key=key, heard="worker draining", folder=folder
        )

    def environment(self, threads, options):
        options = {"worker_threads": threads, "log_format": "json", **options}
        return {PREFIX + name.upper(): str(value) for name, value in options.items()}

    def send(self, actor, key, *args):
        assert enqueue_unique(broker, Message(QUEUE, actor, (key, *args), {}, {}, key))


class Stock(Side):
    """Bare Dramatiq's workers."""

    arguments = ("tests.system.stock_slow_actors",)

    def __init__(self, url, folder):
        self._url = url
        self._broker = RedisBroker(url=url)
        self._broker.declare_queue(QUEUE)
        key = f"{self._broker.namespace}:{QUEUE}"
        super().__init__(
            "stock", "dramatiq", notes=STOCK_NOTES, key=key, heard="Stopping worker process", folder=folder
        )

    def environment(self, _threads, options):
        return {URL: self._url, **{OPTIONS + name.upper(): str(value) for name, value in options.items()}}

    def send(self, actor, key, *args):
        self._broker.enqueue(Message(QUEUE, actor, (key, *args), {}, {}, key))

    def clean_up(self):
        super().clean_up()
        self._broker.client.connection_pool.disconnect()


@contextmanager
def both(url, folder):
    """Provide ours and stock, and leave nothing of theirs behind."""
    sides = Ours(folder), Stock(url, folder)
    try:
        yield sides
    finally:
        for side in sides:
            side.clean_up()


def start(sides, *, masters, threads, processes=1):
    """Start so many masters on each side, and wait for their processes."""
    for side in sides:
        for _ in range(masters):
            side.start(processes=processes, threads=threads)
    eventually(lambda: all(master.ready(processes) for side in sides for master in side.masters[-masters:]))


def fill(sides, keys, go, *, at_work):
    """Let the workers fetch these messages and be at work on so many, until the file *go* is there."""
    for side in sides:
        for key in keys:
            side.send("hold", key, str(go))
    eventually(lambda: all(side.nothing_waits() and len(side.notes("began")) == at_work for side in sides))


def eventually(condition, limit=LIMIT):
    assert wait_until(condition, limit), "it did not come to that in time"


def lifetimes(pids, since, limit):
    """Wait until the processes are gone; say of each how long it lived from that moment on, `inf` if it still does."""
    found = dict.fromkeys(pids, inf)

    def all_gone():
        for pid in pids:
            if found[pid] == inf and not _lives(pid):
                found[pid] = time.monotonic() - since
        return inf not in found.values()

    wait_until(all_gone, limit)
    return found


def _lives(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    # What nobody has fetched from the kernel yet is a process no more.
    return state != "Z"
