"""Ours and stock: forgekeeper's workers and bare Dramatiq's, each behind a proxy of its own before the same Redis."""

import threading
from contextlib import contextmanager
from math import inf

from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker
from forgekeeper.delivery.enqueue_unique import enqueue_unique

from forgekeeper.connections import client
from forgekeeper.delivery.broker import broker
from forgekeeper.settings import PREFIX
from tests.harness.waiting import wait_until

from .actors import NOTES
from .proxy import redis_through
from .stock_actors import URL
from .stock_processes import Master, Note
from .told_work import QUEUE

LIMIT = 60.0
NOTHING = {"": 0, ".DQ": 0}, {"": 0, ".DQ": 0}


class Side:
    """Masters of one kind behind a proxy, the messages they get and what comes of these."""

    def __init__(self, name, key, redis_url, folder, *, proxied=True):
        self.name = name
        self.masters = []
        self.proxy, self.url = redis_through(redis_url) if proxied else (None, redis_url)
        self._key = key
        self._folder = folder
        self._file = folder / f"{name}.notes"

    def start(self, *, threads, queues=(QUEUE,), **options):
        """Start a master with one process, and wait until it works."""
        arguments = (*self.arguments, "--processes", "1", "--threads", str(threads), "--queues", *queues)
        environment = self.environment(worker_threads=threads, **options) | {NOTES: str(self._file)}
        name = f"{self.name}{len(self.masters)}"
        self.masters.append(Master(name, arguments, self._folder, environment, module=self.module))
        self.masters[-1].start()
        return self.masters[-1]

    def ready(self):
        return all(master.ready(1) for master in self.masters)

    def notes(self, what, since=0.0):
        """List what was told of from that moment on, in its order."""
        # The last line may be half written.
        whole = self._file.read_text().rpartition("\n")[0] if self._file.exists() else ""
        found = [Note(kind, key, int(pid), float(at)) for kind, key, pid, at in map(str.split, whole.splitlines())]
        return [note for note in found if note.what == what and note.at >= since]

    def done(self, since=0.0):
        """List what was done, each as often as it was."""
        return sorted(note.key for note in self.notes("done", since))

    def doubled(self):
        """Count what was done more than once."""
        return len(self.done()) - len(set(self.done()))

    def waits(self, keys, since):
        """Say of each message how long after that moment it was done, 0 if before, `inf` if it was not."""
        done = {note.key: max(0.0, note.at - since) for note in reversed(self.notes("done"))}
        return [done.get(key, inf) for key in keys]

    def fetched(self):
        """Say whether workers have taken everything."""
        return not client.llen(self._key) and not client.llen(f"{self._key}.DQ")

    def left(self):
        """Say where messages are left: the lists' lengths, and the ids that have bodies."""
        waiting = {name: client.llen(f"{self._key}{name}") for name in ("", ".DQ")}
        return waiting, {name: client.hlen(f"{self._key}{name}.msgs") for name in ("", ".DQ")}

    def in_hand(self):
        """Count the ids that workers have in hand by Redis's account."""
        namespace = self._key.partition(":")[0]
        return sum(client.scard(key) for key in client.keys(f"{namespace}:__acks__.*"))

    def dead(self):
        return client.hlen(f"{self._key}.XQ.msgs")

    def clean_up(self):
        for master in self.masters:
            master.kill()
        if self.proxy is not None:
            self.proxy.close()


class Ours(Side):
    """Forgekeeper's workers."""

    arguments, module = (), "tests.system.actors"

    def __init__(self, redis_url, folder, **options):
        super().__init__("ours", f"{broker.namespace}:{QUEUE}", redis_url, folder, **options)

    def environment(self, **options):
        options = {"log_format": "json", "redis_url": self.url, **options}
        return {PREFIX + name.upper(): str(value) for name, value in options.items()}

    def send(self, actor, key, *args, delay=None, by=broker):
        """Put a message in that has *key* for its id."""
        message = Message(QUEUE, actor, (key, *args), {}, {}, key)
        if delay is None:
            return enqueue_unique(by, message)
        return by.enqueue(message, delay=round(delay * 1000))

    def lines(self):
        """List the facts of all log lines."""
        return [line for master in self.masters for line in master.lines()]

    def said(self, sentence):
        """List the log lines with that sentence."""
        return [line for line in self.lines() if line.get("message") == sentence]


class Stock(Side):
    """Bare Dramatiq's workers."""

    arguments, module = ("tests.system.stock_actors",), "dramatiq"

    def __init__(self, redis_url, folder, **options):
        self._broker = RedisBroker(url=redis_url)
        self._broker.declare_queue(QUEUE)
        super().__init__("stock", f"{self._broker.namespace}:{QUEUE}", redis_url, folder, **options)

    def environment(self, **_):
        return {URL: self.url}

    def send(self, actor, key, *args, delay=None):
        message = Message(QUEUE, actor, (key, *args), {}, {}, key)
        self._broker.enqueue(message, delay=None if delay is None else round(delay * 1000))

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


def eventually(condition, limit=LIMIT):
    assert wait_until(condition, limit), "it did not come to that in time"


def pass_time(seconds):
    """Let a fault last: its length is what is tested."""
    threading.Event().wait(seconds)
