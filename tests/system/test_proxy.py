"""The proxy before Redis and PostgreSQL breaks what it says it breaks: or else the tests of faults test nothing."""

from contextlib import closing

import psycopg2
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.harness.waiting import wait_until

from .proxy import postgres_through, redis_through

SHORT = 0.3
LIMIT = 60.0


@pytest.fixture
def proxy(urls):
    proxy, url = redis_through(urls.redis)
    with proxy, closing(redis.Redis.from_url(url, socket_timeout=SHORT, retry=Retry(NoBackoff(), 0))) as through:
        wait_until(lambda: answers(through), LIMIT)
        proxy.through = through
        yield proxy


@pytest.fixture
def direct(urls):
    with closing(redis.Redis.from_url(urls.redis)) as client:
        client.delete("a")
        yield client
        client.delete("a")


def answers(client):
    try:
        return client.ping()
    except redis.RedisError:
        return False


def test_what_it_refuses_and_cuts_is_unreachable_until_it_passes(proxy):
    proxy.refuse()
    proxy.cut()

    with pytest.raises(redis.ConnectionError):
        proxy.through.ping()

    proxy.passing()
    assert wait_until(lambda: answers(proxy.through), LIMIT)


def test_a_black_hole_answers_nobody_and_passes_nothing_on(proxy, direct):
    proxy.black_hole()

    with pytest.raises(redis.TimeoutError):
        proxy.through.set("a", 1)

    assert direct.get("a") is None


def test_a_dropped_reply_is_one_to_a_request_that_was_carried_out(proxy, direct):
    proxy.drop_replies(to=b"INCR")

    with pytest.raises(redis.TimeoutError):
        proxy.through.incr("a")

    assert wait_until(lambda: proxy.dropped == 1, LIMIT)
    assert direct.get("a") == b"1"


def test_a_statement_whose_reply_is_dropped_has_been_executed(urls):
    proxy, url = postgres_through(urls.database)
    with proxy, closing(psycopg2.connect(url)) as connection, closing(psycopg2.connect(urls.database)) as other:
        connection.autocommit = other.autocommit = True
        with connection.cursor() as cursor, other.cursor() as witness:
            witness.execute("create table dropped_replies (n int)")
            try:
                proxy.drop_replies(to=b"insert", then_cut=True)
                with pytest.raises(psycopg2.OperationalError):
                    cursor.execute("insert into dropped_replies values (1)")
                witness.execute("select n from dropped_replies")
                assert witness.fetchall() == [(1,)]
            finally:
                witness.execute("drop table dropped_replies")
