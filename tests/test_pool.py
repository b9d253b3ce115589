"""The pool of connections: what is taken from it works, and the server is not asked whether it does."""

import pytest

from forgekeeper.connections import Limits, client, connect
from forgekeeper.database import database, release

ME = "select pg_backend_pid()"


def my_pid():
    (number,) = database.execute_sql(ME).fetchone()
    return number


@pytest.fixture
def pid(settings):
    """The server's process at the other end of the pool's only connection, which nobody has in use."""
    connect(settings, Limits.of_worker(settings), name="tests", connections=1)
    database.connect()
    number = my_pid()
    release()
    yield number
    database.close_all()
    client.connection_pool.disconnect()


def test_a_connection_is_taken_without_a_question(pid, other):
    database.connect()

    other.execute("select query from pg_stat_activity where pid = %s", (pid,))
    assert other.fetchone() == (ME,)


def test_a_connection_that_the_server_has_ended_is_not_taken(pid, other):
    other.execute("select pg_terminate_backend(%s, 10000)", (pid,))

    database.connect()

    assert my_pid() != pid
