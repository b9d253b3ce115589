"""Leases as tests take them: a client that loses replies, and a clock that tests move."""

from contextlib import contextmanager
from datetime import timedelta

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from forgekeeper.coordination.leases import KEY, LeaseLost, lease, leases

TTL = timedelta(seconds=15)
SECOND = timedelta(seconds=1)
NAME = "clean_project_refs:7"


class Faulty(redis.Redis):
    """A client with no way to the server while *away*, and no reply to its next *lose* writes, though they are done."""

    away = False
    lose = 0
    loss = redis.TimeoutError

    def __init__(self, **parameters):
        super().__init__(**parameters)
        self.sent = []
        self.clock = Clock()

    def execute_command(self, *args, **options):
        if self.away:
            raise redis.ConnectionError("no way to the server")
        reply = super().execute_command(*args, **options)
        if args[0] in {"SET", "EVALSHA"}:
            self.sent.append(args)
            if self.lose:
                self.lose -= 1
                raise self.loss("the reply was lost")
        return reply


class Clock:
    """A monotonic clock that moves when told to."""

    now = 1000.0

    def __call__(self):
        return self.now


@contextmanager
def connected(url, **parameters):
    """Connect as the workers do: what gets no answer is not sent again."""
    with redis.BlockingConnectionPool.from_url(url, retry=Retry(NoBackoff(), 0), **parameters) as pool:
        yield Faulty(connection_pool=pool)


def take(client, name=NAME, *, ttl=TTL, holder="worker-1", **options):
    return lease(client, name, ttl=ttl, holder=holder, clock=client.clock, **options)


def pass_time(client, duration):
    """Let every lease have so much less time to live."""
    for key in client.scan_iter(f"{KEY}*"):
        client.pexpire(key, client.pttl(key) - round(duration.total_seconds() * 1_000))


def is_free(client, name=NAME):
    return name not in {held.name for held in leases(client)}


def is_lost(held):
    try:
        held.check()
    except LeaseLost:
        return True
    return False
