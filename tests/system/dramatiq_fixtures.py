"""The fixtures that Dramatiq's own Redis tests ask for, with our broker in place of theirs.

A pytest plugin: `test_dramatiqs_own_tests.py` runs those tests in a process of their own.  What they take from
Dramatiq's test helpers, which do not come with its source, is here in our words.
"""

from __future__ import annotations

import os
import socket
from contextlib import contextmanager

import dramatiq
import pytest
import redis
from dramatiq.middleware import Middleware, Retries, default_middleware
from forgekeeper.process.attempts import ChildRetries

from forgekeeper.delivery.broker import Broker

FEW = 50
HOPELESS = 3
"""After so many seconds one that waits for what never comes is given up."""


class Options(Middleware):
    """Lets actors be children without working on them as such."""

    @property
    def actor_options(self):
        return {"child", "document"}


class AllChildren(Broker):
    """Takes every actor for a child: of a batch nobody but its row sends a message again."""

    def declare_actor(self, actor):
        actor.options["child"] = True
        super().declare_actor(actor)


def pytest_collection_modifyitems(items):
    """Let what fails anyway do so soon."""
    hopeless = os.environ["HOPELESS"].split()
    for item in items:
        if item.name in hopeless:
            item.add_marker(pytest.mark.timeout(HOPELESS))
        # Of messages in a test that wants more than Lua can unpack at once: we pass no such lists.
        item.module.LUA_MAX_UNPACK_SIZE = FEW


@contextmanager
def worker(*args, **options):
    """Run a worker, as Dramatiq's helper of that name does."""
    running = dramatiq.Worker(*args, **options)
    running.start()
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture(autouse=True)
def usual_place(monkeypatch):
    """Lead whoever looks for Redis at its usual port to that of these tests."""

    def connect(_):
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(client.connection_pool.connection_kwargs["path"])
        return connected

    with redis.Redis.from_url(os.environ["OWN_TESTS_REDIS"]) as client:
        monkeypatch.setattr(redis.connection.Connection, "_connect", connect)
        yield


@pytest.fixture
def redis_broker():
    """Our broker, under the namespace that the tests expect, with Dramatiq's middleware but for the retries."""
    theirs = [middleware() for middleware in default_middleware if middleware is not Retries]
    with redis.BlockingConnectionPool.from_url(os.environ["OWN_TESTS_REDIS"]) as pool:
        client = redis.Redis(connection_pool=pool)
        client.flushdb()
        broker = AllChildren(client=client, namespace="dramatiq", middleware=[Options(), ChildRetries(), *theirs])
        broker.emit_after("process_boot")
        dramatiq.set_broker(broker)
        yield broker
        broker.close()


@pytest.fixture
def redis_worker(redis_broker):
    with worker(redis_broker, worker_threads=8, worker_timeout=200) as running:
        yield running
