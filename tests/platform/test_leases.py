import threading
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from forgekeeper.platform.coordination.leases import (
    LEASE_KEY_PREFIX,
    LeaseInTransaction,
    LeaseLost,
    LeaseTaken,
    list_leases,
)
from tests.harness.leases import hold_lease
from tests.harness.thorough import whole_only
from tests.harness.waiting import wait_until

LIMIT = 60.0
SECOND = timedelta(seconds=1)


class Client(redis.Redis):
    """A client with no way to the server while *away*, nor for its next command if *cut*, and a monotonic clock that moves when a test says so."""

    away = cut = False
    now = 1000.0

    def execute_command(self, *args, **options):
        cut, self.cut = self.cut, False
        if self.away or cut:
            raise redis.ConnectionError("no way to the server")
        return super().execute_command(*args, **options)


@pytest.fixture
def client(urls):
    with redis.BlockingConnectionPool.from_url(urls.redis, retry=Retry(NoBackoff(), 0)) as pool:
        client = Client(connection_pool=pool)
        client.flushdb()
        yield client


@pytest.fixture
def other(client):
    return Client(connection_pool=client.connection_pool)


def take(client, name="clean_project_refs:7", *, ttl=15 * SECOND, holder="worker-1", **options):
    return hold_lease(client, name, ttl=ttl, holder=holder, clock=lambda: client.now, **options)


# Taking


@pytest.mark.parametrize("name", ["a:b:c", "*", "ref / 東", ""])
def test_a_lease_of_any_name_that_another_holds_is_refused_and_stays_its_holder_s(client, other, name):
    with take(client, name) as held:
        with pytest.raises(LeaseTaken), take(other, name):
            pass
        held.check()

        assert [held.name for held in list_leases(client)] == [name]


def test_inside_a_transaction_it_is_refused_before_redis_hears_of_it(client, database):
    client.away = True

    with database.atomic(), pytest.raises(LeaseInTransaction), take(client, is_forbidden=database.in_transaction):
        pytest.fail("a lease in a transaction")


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


def test_it_is_given_back_though_a_connection_is_lost(client):
    with take(client):
        client.cut = True

    assert client.keys() == []


def test_a_late_holder_frees_nothing(client, other):
    with ExitStack() as stack:
        with take(client):
            client.flushdb()  # as if it had expired
            owner = stack.enter_context(take(other))

        owner.check()


# Renewing


@whole_only
def test_a_lease_is_renewed_while_its_holder_works(client):
    with take(client, ttl=9 * SECOND):
        assert wait_until(lambda: list_leases(client)[0].left < 8 * SECOND, LIMIT)

        assert wait_until(lambda: list_leases(client)[0].left > 8 * SECOND, LIMIT)


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

        client.now += 14.9
        held.check()
        client.now += 0.1
        with pytest.raises(LeaseLost):
            held.check()


# Looking


def test_held_leases_are_listed_with_holder_beginning_and_what_is_left(client, other):
    began = datetime.now(UTC) - SECOND
    with take(client, "second", holder="host-1:12"):
        client.set(f"{LEASE_KEY_PREFIX}first", "token 1 host 2", ex=60)

        first, second = list_leases(client)

    assert (first.name, first.holder, second.name, second.holder) == ("first", "host 2", "second", "host-1:12")
    assert first.since == datetime.fromtimestamp(1, UTC)
    assert began <= second.since <= datetime.now(UTC) + SECOND
    assert timedelta() < second.left <= 15 * SECOND < first.left
