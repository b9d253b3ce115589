"""The client of Redis, on a real server."""

import signal

import pytest
import redis

from forgekeeper.platform.connections import client

pytestmark = pytest.mark.usefixtures("database")


class Interrupted(BaseException):
    """The exception of an interrupt in the middle of a command."""


def test_a_connection_that_the_server_has_closed_is_not_used(urls):
    client.ping()
    redis.Redis.from_url(urls.redis).client_kill_filter(_type="normal", skipme=True)
    assert client.ping()


def test_the_reply_to_an_interrupted_command_is_read_by_no_other_command():
    def interrupt(_signal, _frame):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupted):
            client.blpop("late", 5)
    finally:
        signal.signal(signal.SIGALRM, before)
    client.rpush("late", "its reply")
    assert client.ping() is True


def test_a_connection_with_an_error_is_closed():
    client.set("text", "not a number")
    used = client.client_id()
    with pytest.raises(redis.ResponseError):
        client.incr("text")
    assert client.client_id() != used


def test_a_connection_is_used_again():
    assert client.client_id() == client.client_id()


def test_a_postponed_command_is_executed_before_the_next_command():
    client.set("name", "old")
    client.postpone("SET", "name", "new")
    assert redis.Redis(connection_pool=client.connection_pool).get("name") == b"old"
    assert client.get("name") == b"new"


def test_a_postponed_command_is_executed_once():
    client.postpone("INCR", "times")
    client.ping()
    assert client.get("times") == b"1"


def test_an_error_of_a_postponed_command_is_raised_once():
    client.set("text", "not a number")
    client.postpone("INCR", "text")
    with pytest.raises(redis.ResponseError):
        client.ping()
    assert client.ping()
