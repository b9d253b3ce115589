import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest
import redis

from forgekeeper.coordination.leases import (
    OWNERS,
    SINCE,
    UNTIL,
    LeaseInTransaction,
    LeaseTaken,
    break_lease,
    lease,
    leases,
)
from tests.harness.leases import (
    NAME,
    SECOND,
    Pauses,
    connected,
    is_free,
    is_lost,
    pass_time,
    state,
    take,
)
from tests.harness.waiting import wait_until
from tests.system.proxy import redis_through

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


def test_a_lease_that_another_holds_is_refused_and_stays_its_holder_s(client, other):
    with take(client) as held:
        before = state(client)

        with pytest.raises(LeaseTaken), take(other):
            pass

        assert state(client) == before
        held.check()


@pytest.mark.parametrize("name", ["a:b:c", ":", "{leases}", "ref / 東", "", "until"])
def test_any_text_is_a_name(client, other, name):
    with take(client, name) as held:
        with pytest.raises(LeaseTaken), take(other, name):
            pass
        held.check()

        assert [held.name for held in leases(client)] == [name]


def test_an_expired_lease_is_to_be_had_without_a_release(client, other):
    with take(client):
        pass_time(client, 16 * SECOND)

        with take(other) as held:
            held.check()


def test_a_lease_that_has_not_quite_expired_is_not_to_be_had(client, other):
    with take(client):
        pass_time(client, 14 * SECOND)

        with pytest.raises(LeaseTaken), take(other):
            pytest.fail("two holders")


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


def test_after_a_release_whose_reply_was_lost_it_is_free(client):
    with take(client):
        client.lose = 1

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
            before = state(client)

        assert state(client) == before
        owner.check()


# Renewing


def test_a_lease_outlives_its_ttl_while_its_holder_works(client):
    with take(client, ttl=4 * SECOND):
        [taken] = leases(client)

        assert wait_until(lambda: now(client) > taken.since + 5 * SECOND, LIMIT)

        assert not is_free(client)


def test_it_is_renewed_every_third_of_its_ttl(client):
    pauses = Pauses(3)
    with take(client) as held:
        pass_time(client, 14 * SECOND)

        held.keep(pauses)

        assert pauses.seconds == [5, 5, 5, 5]
        assert len(client.sent) == 1 + 3
        assert leases(client)[0].left > 14 * SECOND


def test_where_no_thread_can_be_had_there_is_no_lease(client, monkeypatch):
    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)

    with pytest.raises(RuntimeError, match="start new thread"), take(client):
        pytest.fail("a lease that nobody renews")

    assert client.keys() == []


def test_a_late_holder_does_not_renew_the_lease_of_the_next(client, other):
    with take(client) as late:
        pass_time(client, 16 * SECOND)
        with take(other):
            before = state(client)

            lost = is_lost(late)

            assert lost
            assert state(client) == before


def test_checking_renews(client):
    with take(client) as held:
        for _ in range(3):
            pass_time(client, 14 * SECOND)
            held.check()

        assert leases(client)[0].left > 14 * SECOND


def now(client):
    seconds, microseconds = client.time()
    return datetime.fromtimestamp(seconds, UTC) + timedelta(microseconds=microseconds)


# Without proof


def test_a_holder_who_reaches_no_server_is_believed_until_his_ttl_is_over(client):
    with take(client) as held:
        client.away = True

        client.clock.now += 14.9
        held.check()
        client.clock.now += 0.1
        assert is_lost(held)


def test_after_a_flush_it_is_lost(client):
    with take(client) as held:
        client.flushall()

        assert is_lost(held)
        assert client.keys() == []


def test_a_server_that_does_not_answer_is_not_waited_for_and_not_believed_in(urls, client):
    proxy, url = redis_through(urls.redis)
    with proxy, connected(url, socket_timeout=1) as slow, lease(slow, NAME, ttl=3 * SECOND, holder="worker-1") as held:
        # It is stopped, not dead: connections open, and nothing comes back.
        proxy.black_hole()
        began = time.monotonic()
        asked = [began]
        while not is_lost(held):
            asked.append(time.monotonic())
        took = [after - before for before, after in pairwise([*asked, time.monotonic()])]

        assert all(at - began < 3.0 for at in asked[:-1])
        # A second each, and as many as fit into three; a busy machine may add to that.
        assert max(took) < 6
        assert sum(took) < 10


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


def test_a_killed_holder_s_lease_is_free_after_its_ttl(client, started):
    process = started(HOLDER, ttl=5)
    assert process.stdout.readline() == "held\n"

    process.kill()
    process.wait(LIMIT)

    [held] = leases(client)
    assert held.left <= 5 * SECOND
    assert wait_until(lambda: is_free(client), LIMIT)
    with take(client) as held:
        held.check()


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
    with take(client, "first", holder="host-1:12"), take(other, "second", holder="host 2"):
        pass_time(client, 5 * SECOND)

        first, second = leases(client)

    assert (first.name, first.holder, second.name, second.holder) == ("first", "host-1:12", "second", "host 2")
    assert timedelta() < second.since - first.since < 5 * SECOND
    assert 5 * SECOND <= datetime.now(UTC) - first.since < 15 * SECOND
    assert 2 * SECOND < first.left <= 10 * SECOND


def test_expired_leases_are_forgotten_when_the_next_is_taken(client):
    for number in range(3):
        with take(client, f"crashed:{number}"):
            client.away = True
        client.away = False
    pass_time(client, 16 * SECOND)

    with take(client):
        assert (client.zcard(UNTIL), client.zcard(SINCE), client.hlen(OWNERS)) == (1, 1, 1)


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


def test_a_lease_that_a_clock_that_was_ahead_has_given_ends_ten_minutes_after_another_asks_for_it(client):
    client.zadd(UNTIL, {NAME: client.time()[0] + 86400})
    client.zadd(SINCE, {NAME: client.time()[0] + 86385})
    client.hset(OWNERS, NAME, "token a dead process")

    with pytest.raises(LeaseTaken), take(client):
        pass

    (held,) = leases(client)
    assert held.left <= timedelta(minutes=10)
