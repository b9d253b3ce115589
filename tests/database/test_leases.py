import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import redis

from forgekeeper.coordination.leases import KEY, LeaseInTransaction, LeaseTaken, break_lease, leases
from tests.harness.leases import NAME, SECOND, connected, is_free, is_lost, pass_time, take
from tests.harness.waiting import wait_until

ROOT = Path(__file__).parents[2]
LIMIT = 60.0

HOLDER = """
import sys
from datetime import timedelta
import redis
from forgekeeper.coordination.leases import LeaseLost
from forgekeeper.coordination.leases import lease

client = redis.Redis.from_url(sys.argv[1])
with lease(client, sys.argv[2], ttl=timedelta(seconds=float(sys.argv[3])), holder="a process") as held:
    print("held", flush=True)
    for _ in sys.stdin:
        try:
            held.check()
            print("still held", flush=True)
        except LeaseLost:
            print("lost", flush=True)
"""


@pytest.fixture
def client(urls):
    with connected(urls.redis) as client:
        client.flushdb()
        yield client


@pytest.fixture
def other(urls):
    with connected(urls.redis) as client:
        yield client


@pytest.fixture
def started(client, urls):
    """Start a process that holds the lease, and is killed in the end whatever happens."""
    with ExitStack() as stack:

        def start(program, ttl):
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", program, urls.redis, NAME, str(ttl)],
                    env={**os.environ, "PYTHONPATH": str(ROOT)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            return process

        yield start


# Taking


@pytest.mark.parametrize("name", ["a:b:c", "*", "ref / 東", ""])
def test_a_lease_of_any_name_that_another_holds_is_refused_and_stays_its_holder_s(client, other, name):
    with take(client, name) as held:
        with pytest.raises(LeaseTaken), take(other, name):
            pass
        held.check()

        assert [held.name for held in leases(client)] == [name]


def test_inside_a_transaction_it_is_refused_before_redis_hears_of_it(client, database):
    with database.atomic(), pytest.raises(LeaseInTransaction), take(client, forbidden=database.in_transaction):
        pytest.fail("a lease in a transaction")

    assert client.sent == []


# A lost reply


@pytest.mark.parametrize("loss", [redis.TimeoutError, redis.ConnectionError])
def test_a_lease_whose_reply_was_lost_is_ours(client, other, loss):
    client.lose, client.loss = 1, loss

    with take(client) as held:
        held.check()
        with pytest.raises(LeaseTaken), take(other):
            pass

    assert client.keys() == []


# Giving back


@pytest.mark.parametrize("way_out", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_it_is_given_back_on_every_way_out(client, way_out):
    with pytest.raises(way_out), take(client):
        raise way_out

    assert client.keys() == []


def test_a_release_that_reaches_no_server_does_not_hide_what_the_body_raised(client):
    def work():
        client.away = True
        raise ValueError("of the body")

    with pytest.raises(ValueError, match="of the body"), take(client):
        work()


def test_a_late_holder_frees_nothing(client, other):
    with ExitStack() as stack:
        with take(client):
            pass_time(client, 16 * SECOND)
            owner = stack.enter_context(take(other))

        owner.check()


# Renewing


def test_a_lease_outlives_its_ttl_while_its_holder_works(client):
    with take(client, ttl=3 * SECOND):
        began = time.monotonic()

        assert wait_until(lambda: time.monotonic() > began + 5, LIMIT)

        assert not is_free(client)


def test_where_no_thread_can_be_had_there_is_no_lease(client, monkeypatch):
    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)

    with pytest.raises(RuntimeError, match="start new thread"), take(client):
        pytest.fail("a lease that nobody renews")

    assert client.keys() == []


# Without proof


def test_a_holder_who_reaches_no_server_is_believed_until_his_ttl_is_over(client):
    with take(client) as held:
        client.away = True

        client.clock.now += 14.9
        held.check()
        client.clock.now += 0.1
        assert is_lost(held)


# A hard bound


def test_nobody_holds_it_for_longer_than_at_most(client):
    with take(client, at_most=timedelta(minutes=1)) as held:
        for _ in range(5):
            client.clock.now += 10
            held.check()
        client.clock.now += 9.9
        held.check()

        client.clock.now += 0.1
        assert is_lost(held)


# Processes


def test_a_stopped_holder_learns_that_he_was_replaced(client, started):
    process = started(HOLDER, ttl=1)
    assert process.stdout.readline() == "held\n"
    process.send_signal(signal.SIGSTOP)
    assert wait_until(lambda: is_free(client), LIMIT)

    with take(client) as held:
        process.send_signal(signal.SIGCONT)
        process.stdin.write("check\n")
        process.stdin.flush()

        assert process.stdout.readline() == "lost\n"
        process.stdin.close()
        process.wait(LIMIT)
        held.check()


# Looking, and breaking


def test_held_leases_are_listed_with_holder_beginning_and_what_is_left(client, other):
    began = datetime.now(UTC) - SECOND
    with take(client, "second", holder="host-1:12"):
        client.set(f"{KEY}first", "token 1 host 2", ex=60)

        first, second = leases(client)

    assert (first.name, first.holder, second.name, second.holder) == ("first", "host 2", "second", "host-1:12")
    assert first.since == datetime.fromtimestamp(1, UTC)
    assert began <= second.since <= datetime.now(UTC) + SECOND
    assert timedelta() < second.left <= 15 * SECOND < first.left


def test_a_broken_lease_is_free(client, other):
    with take(client):
        broken = break_lease(client, NAME)

        assert broken
        assert client.keys() == []
        with take(other) as held:
            held.check()


def test_a_server_that_forgot_the_scripts_is_taught_them_again(client):
    client.script_flush()

    with take(client) as held:
        held.check()
