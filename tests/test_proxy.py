"""The proxy that system tests put before Redis and PostgreSQL fails as it is told to, and in no other way."""

import hashlib
import socket
import threading
import time
from contextlib import closing, suppress

import psycopg2
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.harness.waiting import wait_until

from .system.proxy import Proxy, postgres_through, redis_through

PATIENCE = 0.3
LIMIT = 60.0


@pytest.fixture
def through(urls):
    """A proxy before the Redis of the tests."""
    proxy, url = redis_through(urls.redis)
    with proxy:
        yield proxy, url


@pytest.fixture
def proxy(through):
    return through[0]


@pytest.fixture
def connect(through):
    """Make clients that repeat nothing by themselves and wait for so long."""
    made = []

    def connect(patience=LIMIT):
        client = redis.Redis.from_url(
            through[1], socket_timeout=patience, socket_connect_timeout=patience, retry=Retry(NoBackoff(), 0)
        )
        made.append(client)
        assert wait_until(lambda: answers(client), LIMIT)
        return client

    yield connect
    for client in made:
        client.close()


def answers(client):
    """Say whether the client, which may have little patience, has got an answer."""
    with suppress(redis.TimeoutError):
        return client.ping()
    return False


@pytest.fixture
def direct(urls):
    with closing(redis.Redis.from_url(urls.redis)) as client:
        client.flushdb()
        yield client


@pytest.fixture
def echo():
    """A server that sends back what it gets, in pieces as they come; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield listener.getsockname()


def serve(listener):
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=repeat, args=(connection,), daemon=True).start()


def repeat(connection):
    with connection, suppress(ConnectionError):
        while data := connection.recv(1 << 16):
            connection.sendall(data)


def talk(proxy):
    """Connect through the proxy; return when something has come back."""
    connection = socket.create_connection(("127.0.0.1", proxy.port), LIMIT)
    connection.sendall(b"?")
    assert connection.recv(1) == b"?"
    return connection


def receive(connection, size):
    received = bytearray()
    while len(received) < size and (data := connection.recv(1 << 16)):
        received += data
    return bytes(received)


def test_what_passes_passes_whole(connect, direct):
    value = b"\x00\r\n" * 500_000

    connect().set("a", value)

    assert (direct.get("a"), connect().get("a")) == (value, value)


def test_it_counts_its_connections(proxy, connect):
    clients = [connect(), connect()]
    counts = proxy.connections, proxy.open

    clients[0].close()

    assert counts == (2, 2)
    assert wait_until(lambda: proxy.open == 1, LIMIT)
    assert proxy.connections == 2


def test_it_refuses_new_connections_and_keeps_the_open_ones(proxy, connect):
    client = connect()

    proxy.refuse()

    assert client.ping()
    with pytest.raises(redis.ConnectionError, match="refused"):
        connect()


def test_what_was_refused_is_let_in_again(proxy, connect):
    proxy.refuse()

    proxy.passing()

    assert connect().ping()


def test_a_cut_resets_all_connections_and_new_ones_pass(echo):
    with Proxy(echo) as proxy, talk(proxy) as one, talk(proxy) as two:
        proxy.cut()

        for connection in (one, two):
            with pytest.raises(ConnectionResetError):
                connection.recv(1)
        with talk(proxy):
            assert proxy.connections == 3


def test_a_black_hole_answers_nobody_and_tells_the_server_nothing(proxy, connect, direct):
    client = connect(patience=PATIENCE)
    proxy.black_hole()

    with pytest.raises(redis.TimeoutError):
        client.set("a", 1)
    # Again on a new connection: the old one ended with the first.
    with pytest.raises(redis.TimeoutError):
        client.set("a", 1)

    assert wait_until(lambda: proxy.connections == 2, LIMIT)
    assert direct.get("a") is None


def test_what_a_black_hole_has_swallowed_arrives_when_it_passes(echo):
    with Proxy(echo) as hole, talk(hole) as connection:
        hole.black_hole()
        connection.sendall(b"late")

        hole.passing()

        assert receive(connection, 4) == b"late"


def test_a_dropped_reply_is_one_to_a_request_that_was_carried_out(proxy, connect, direct):
    client = connect(patience=PATIENCE)
    proxy.drop_replies()

    with pytest.raises(redis.TimeoutError):
        client.incr("a")

    assert wait_until(lambda: proxy.dropped == 1, LIMIT)
    assert (direct.get("a"), connect().incr("a")) == (b"1", 2)


def test_so_many_replies_are_dropped_as_asked_for(proxy, connect, direct):
    clients = [connect(patience=PATIENCE) for _ in range(2)]
    proxy.drop_replies(2, to=b"INCR")

    for client in clients:
        with pytest.raises(redis.TimeoutError):
            client.incr("a")

    assert wait_until(lambda: proxy.dropped == 2, LIMIT)
    assert (connect().incr("a"), direct.get("a")) == (3, b"3")


def test_replies_to_other_requests_are_not_dropped(proxy, connect):
    client = connect(patience=PATIENCE)
    proxy.drop_replies(to=b"INCR")

    connect().set("a", 1)

    with pytest.raises(redis.TimeoutError):
        client.incr("a")


def test_a_dropped_reply_can_end_its_connection(proxy, connect, direct):
    client, other = connect(), connect()
    proxy.drop_replies(to=b"INCR", then_cut=True)

    with pytest.raises(redis.ConnectionError):
        client.incr("a")

    assert (direct.get("a"), other.ping(), proxy.open) == (b"1", True, 1)


def test_latency_is_added_each_way_and_taken_away(proxy, connect):
    client = connect()
    proxy.passing(latency=0.1)
    slow = lasting(client.ping)

    proxy.passing()

    assert slow >= 0.2
    assert min(lasting(client.ping) for _ in range(20)) < 0.1


def lasting(what):
    began = time.monotonic()
    what()
    return time.monotonic() - began


def test_late_bytes_keep_their_order(echo):
    sent = b"".join(hashlib.sha256(bytes([number])).digest() for number in range(256)) * 500
    with Proxy(echo) as proxy, talk(proxy) as connection:
        proxy.passing(latency=0.05)
        writer = threading.Thread(target=connection.sendall, args=(sent,))
        writer.start()

        received = receive(connection, len(sent))

        writer.join(LIMIT)
    assert received == sent


def test_a_server_that_is_away_ends_the_connection():
    with socket.socket() as bound:
        # Nobody listens, and nobody else can.
        bound.bind(("127.0.0.1", 0))
        away = bound.getsockname()
        with Proxy(away) as proxy, socket.create_connection(("127.0.0.1", proxy.port), LIMIT) as connection:
            assert connection.recv(1) == b""


def test_a_closed_proxy_is_gone(echo):
    with Proxy(echo) as proxy:
        connection = talk(proxy)

    with connection, pytest.raises(ConnectionResetError):
        connection.recv(1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", proxy.port), LIMIT)


def test_postgresql_is_reached_through_it_and_loses_its_connection(urls):
    proxy, url = postgres_through(urls.database)
    with proxy, closing(psycopg2.connect(url)) as connection, connection.cursor() as cursor:
        cursor.execute("select 1")
        assert (cursor.fetchall(), proxy.connections) == ([(1,)], 1)

        proxy.cut()

        with pytest.raises(psycopg2.OperationalError):
            cursor.execute("select 1")


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
