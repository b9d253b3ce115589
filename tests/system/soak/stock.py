"""Ours and stock: forgekeeper's workers and bare Dramatiq's, each behind a proxy of its own before the same Redis."""

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

from forgekeeper.connections import client
from forgekeeper.delivery.broker import broker
from forgekeeper.settings import PREFIX
from tests.harness.waiting import wait_until
from tests.system.proxy import redis_through
from tests.system.service import Service

from .actors import NOTES, QUEUE
from .stock_actors import OPTIONS, URL

LIMIT = 60.0
READY = "Worker process is ready for action."
PREFETCH = "dramatiq_queue_prefetch"


class Note(NamedTuple):
    """What an actor wrote down: that it began, failed or was done, with which message, in which process, when."""

    what: str
    key: str
    pid: int
    at: float


class Master(Service):
    """A master with its worker processes."""

    @property
    def log(self):
        return (self.folder / f"{self.name}-{self.lives}.log").read_text(errors="replace")

    def ready(self, processes=1):
        """Say whether all its processes are up."""
        return self.log.count(READY) == processes

    def ask_to_end(self, *, group):
        """Send SIGTERM to the master, or to it and all its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM) if group else self.process.terminate()


class Side:
    """Masters of one kind behind a proxy, the messages they get and what comes of these."""

    def __init__(self, name, broker, redis_url, folder):
        self.name = name
        self.masters = []
        self.proxy, self.url = redis_through(redis_url)
        self.key = f"{broker.namespace}:{QUEUE}"
        self._broker = broker
        self._folder = folder
        self._file = folder / f"{name}.notes"

    def start(self, *, threads, processes=1, prefetch=None, **options):
        """Start a master, with settings or broker options that are not the defaults."""
        sizes = ("--processes", str(processes), "--threads", str(threads), "--queues", QUEUE)
        environment = self.environment(threads, options) | {NOTES: str(self._file)}
        environment |= {PREFETCH: str(prefetch)} if prefetch else {}
        name = f"{self.name}{len(self.masters)}"
        self.masters.append(Master(name, (*self.arguments, *sizes), self._folder, environment, module=self.module))
        self.masters[-1].start()
        return self.masters[-1]

    def ready(self):
        return all(master.ready() for master in self.masters)

    def send(self, actor, key, *args):
        """Put a message in that has *key* for its id."""
        self._broker.enqueue(Message(QUEUE, actor, (key, *args), {}, {}, key))

    def notes(self, what, since=0.0):
        """List what was written down from that moment on, in its order."""
        # The last line may be half written.
        whole = self._file.read_text().rpartition("\n")[0] if self._file.exists() else ""
        found = [Note(kind, key, int(pid), float(at)) for kind, key, pid, at in map(str.split, whole.splitlines())]
        return [note for note in found if note.what == what and note.at >= since]

    def done(self):
        """List what was done, each as often as it was."""
        return sorted(note.key for note in self.notes("done"))

    def doubled(self):
        """Count what was done more than once."""
        return len(self.done()) - len(set(self.done()))

    def waits(self, keys, since, what="began"):
        """Say of each message how long after that moment it began, or was done; `inf` if it did not."""
        first = {note.key: note.at - since for note in reversed(self.notes(what, since))}
        return [first.get(key, inf) for key in keys]

    def runs(self, keys):
        """Count how often each was begun."""
        return Counter(note.key for note in self.notes("began") if note.key in keys)

    def nothing_waits(self):
        """Say whether workers have fetched everything."""
        return client.llen(self.key) == 0

    def nothing_is_left(self):
        """Say whether each message has come to its end."""
        return not any(client.exists(f"{self.key}{end}") for end in ("", ".msgs"))

    def clean_up(self):
        for master in self.masters:
            master.kill()
        self.proxy.close()


class Ours(Side):
    """Forgekeeper's workers."""

    arguments, module = (), "tests.system.soak.actors"

    def __init__(self, redis_url, folder):
        super().__init__("ours", broker, redis_url, folder)

    def environment(self, threads, options):
        options = {"worker_threads": threads, "log_format": "json", "redis_url": self.url, **options}
        return {PREFIX + name.upper(): str(value) for name, value in options.items()}


class Stock(Side):
    """Bare Dramatiq's workers."""

    arguments, module = ("tests.system.soak.stock_actors",), "dramatiq"

    def __init__(self, redis_url, folder):
        bare = RedisBroker(url=redis_url)
        bare.declare_queue(QUEUE)
        super().__init__("stock", bare, redis_url, folder)

    def environment(self, _threads, options):
        return {URL: self.url, **{OPTIONS + name.upper(): str(value) for name, value in options.items()}}

    def clean_up(self):
        super().clean_up()
        self._broker.client.connection_pool.disconnect()


@contextmanager
def cleaned_up(*sides):
    """Leave nothing behind of what *sides* start."""
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
    """Let the workers fetch these messages and work on so many, until the file *go* is there."""
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
