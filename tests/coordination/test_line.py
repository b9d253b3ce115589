"""The line of a worker's steps: one connection while they come one after the other."""

from datetime import timedelta

import pytest
import redis

from forgekeeper.delivery import line as module
from forgekeeper.delivery.line import Line

ALWAYS = timedelta(hours=1).total_seconds()
NEVER = -1


@pytest.fixture
def client(urls):
    pool = redis.BlockingConnectionPool.from_url(urls.redis, max_connections=2, timeout=1)
    yield redis.Redis(connection_pool=pool)
    pool.disconnect()


def hang_up(client, line):
    """Let the server close the line's connection."""
    client.client_kill_filter(_id=line.client_id())


def test_commands_that_follow_one_another_have_one_connection(client, monkeypatch):
    monkeypatch.setattr(module, "KEPT", ALWAYS)
    line = Line(client)

    found = {line.client_id() for _ in range(3)}

    assert len(found) == 1
    assert client.client_id() not in found


def test_after_a_pause_a_connection_that_redis_has_closed_is_another_one(client, monkeypatch):
    monkeypatch.setattr(module, "KEPT", ALWAYS)
    line = Line(client)
    hang_up(client, line)
    monkeypatch.setattr(module, "KEPT", NEVER)

    assert line.ping()


def test_after_an_error_the_connection_is_another_one(client, monkeypatch):
    monkeypatch.setattr(module, "KEPT", ALWAYS)
    line = Line(client)
    before = line.client_id()
    with pytest.raises(redis.ResponseError):
        line.execute_command("NO SUCH COMMAND")

    # And it is the line's alone.
    assert line.client_id() not in {before, client.client_id()}


def test_a_connection_that_redis_closes_between_two_commands_costs_one_of_them(client, monkeypatch):
    monkeypatch.setattr(module, "KEPT", ALWAYS)
    line = Line(client)
    hang_up(client, line)

    with pytest.raises(redis.ConnectionError):
        line.ping()

    assert line.ping()


def test_whatever_ends_a_command_the_connections_of_the_pool_are_not_used_up(client, monkeypatch):
    monkeypatch.setattr(module, "KEPT", NEVER)
    line = Line(client)

    for _ in range(5):
        with pytest.raises(redis.ResponseError):
            line.execute_command("NO SUCH COMMAND")
        line.ping()

    assert {client.ping(), line.ping()} == {True}
