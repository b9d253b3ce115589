"""The fixtures that Dramatiq's own tests ask for: its broker and its middleware, with the encoder of this project.

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
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.encoder import JSONEncoder

from forgekeeper.delivery.messages import MessageEncoder


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
    """Lead what looks for Redis at its usual port to that of these tests."""

    def connect(_):
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(client.connection_pool.connection_kwargs["path"])
        return connected

    with redis.Redis.from_url(os.environ["OWN_TESTS_REDIS"]) as client:
        monkeypatch.setattr(redis.connection.Connection, "_connect", connect)
        yield


@pytest.fixture
def redis_broker():
    with redis.BlockingConnectionPool.from_url(os.environ["OWN_TESTS_REDIS"]) as pool:
        client = redis.Redis(connection_pool=pool)
        client.flushdb()
        dramatiq.set_encoder(MessageEncoder())
        broker = RedisBroker(client=client)
        broker.emit_after("process_boot")
        dramatiq.set_broker(broker)
        yield broker
        broker.close()


@pytest.fixture
def redis_worker(redis_broker):
    with worker(redis_broker, worker_threads=8) as running:
        yield running


@pytest.fixture
def stub_broker():
    # Its messages have none of the ids that Redis's have, and ours asks for.
    dramatiq.set_encoder(JSONEncoder())
    broker = StubBroker()
    broker.emit_after("process_boot")
    dramatiq.set_broker(broker)
    yield broker
    broker.flush_all()
    broker.close()


@pytest.fixture
def stub_worker(stub_broker):
    with worker(stub_broker, worker_timeout=100, worker_threads=32) as running:
        yield running
