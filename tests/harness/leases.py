"""Leases as tests take them: a client that loses replies, and a clock that tests move."""

import threading
from contextlib import contextmanager
from datetime import timedelta

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from forgekeeper.coordination.leases import OWNERS, SINCE, UNTIL, LeaseLost, lease, leases

TTL = timedelta(seconds=15)
SECOND = timedelta(seconds=1)
NAME = "clean_project_refs:7"


class Faulty(redis.Redis):
    """A client with no way to the server while *away*, and no reply to its next *lose* scripts, though they run."""

    away = False
    lose = 0
    loss = redis.TimeoutError
    takes = 0.0

    def __init__(self, **parameters):
        super().__init__(**parameters)
        self.sent = []
        self.clock = Clock()

    def execute_command(self, *args, **options):
        if self.away:
            raise redis.ConnectionError("no way to the server")
        reply = super().execute_command(*args, **options)
        if args[0] == "EVALSHA":
            self.sent.append(args)
            self.clock.now += self.takes
            if self.lose:
                self.lose -= 1
                raise self.loss("the reply was lost")
        return reply

    def repeat(self, which):
        """Run an earlier script again: a network that delivers twice, and late."""
        return self.execute_command(*self.sent[which])


class Clock:
    """A monotonic clock that moves when told to."""

    now = 1000.0

    def __call__(self):
        return self.now


class Pauses:
    """Stands for the event that ends the renewals: set after *count* pauses, none of which takes any time."""

    def __init__(self, count):
        self.count = count
        self.seconds = []

    def wait(self, seconds):
        self.seconds.append(seconds)
        return len(self.seconds) > self.count


@contextmanager
def connected(url, **parameters):
    """Connect as the workers do: what gets no answer is not sent again."""
    with redis.BlockingConnectionPool.from_url(url, retry=Retry(NoBackoff(), 0), **parameters) as pool:
        yield Faulty(connection_pool=pool)


def take(client, name=NAME, *, ttl=TTL, holder="worker-1", **options):
    return lease(client, name, ttl=ttl, holder=holder, clock=client.clock, **options)


def pass_time(client, duration):
    """What the scripts see of time is how far the scores lie back."""
    for key in (UNTIL, SINCE):
        for member in client.zrange(key, 0, -1):
            client.zincrby(key, -duration.total_seconds(), member)


def state(client):
    return client.zrange(UNTIL, 0, -1, withscores=True), client.zrange(SINCE, 0, -1, withscores=True), owners(client)


def owners(client):
    return client.hgetall(OWNERS)


def is_free(client, name=NAME):
    return name not in {held.name for held in leases(client)}


def is_lost(held):
    try:
        held.check()
    except LeaseLost:
        return True
    return False


def keepers():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lease")]
