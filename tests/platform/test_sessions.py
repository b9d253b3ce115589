"""Sessions: what a pool hands out works, a server that does not answer is given up, statements are planned once."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import peewee as pw
import pytest
from playhouse.pool import MaxConnectionsExceeded

from demo.servers import run_servers
from forgekeeper.platform.database import database, release_connection
from forgekeeper.platform.database.session_settings import Timeouts
from forgekeeper.platform.database.sessions import (
    Statement,
    execute_in_one_request,
    execute_prepared,
    open_pool,
)
from tests.harness.thorough import whole_only
from tests.system.proxy import Proxy, postgres_through

ME = "select pg_backend_pid()"
SECONDS = timedelta(seconds=2)
LIMIT = 20.0
STATEMENT = "select %(one)s::bigint + %(other)s::bigint, '100 %%'"
PREPARED = "select name, statement from pg_prepared_statements"
WAITS = "select name, setting from pg_settings where name = any(%s)"


def my_pid():
    (number,) = database.execute_sql(ME).fetchone()
    return number


@pytest.fixture
def opened(urls):
    """Open a pool of one connection."""

    def make(url=None):
        open_pool(url or urls.database, Timeouts(SECONDS, 3 * SECONDS, SECONDS, SECONDS, SECONDS), name="tests", size=1)
        database.connect()
        return my_pid()

    yield make
    database.close_all()


def test_a_connection_that_the_server_has_ended_is_not_taken(opened, other):
    pid = opened()
    release_connection()
    other.execute("select pg_terminate_backend(%s, 10000)", (pid,))

    database.connect()

    assert my_pid() != pid


def test_an_interrupted_transaction_goes_to_nobody_else(opened):
    pid = opened()
    database.execute_sql("begin")

    release_connection()
    database.connect()

    assert my_pid() != pid


@whole_only
def test_no_more_connections_are_made_than_the_pool_has(opened):
    opened()

    with ThreadPoolExecutor(1) as another, pytest.raises(MaxConnectionsExceeded):
        another.submit(database.connect).result()


def test_the_server_ends_what_takes_longer_than_the_settings_say(opened):
    opened()

    assert dict(database.execute_sql(WAITS, (["statement_timeout", "lock_timeout"],)).fetchall()) == {
        "statement_timeout": "6000",
        "lock_timeout": "2000",
    }


@whole_only
def test_a_server_that_does_not_answer_is_given_up_and_its_place_in_the_pool_is_free_again(opened, urls):
    proxy, url = postgres_through(urls.database)
    with proxy:
        opened(url)
        database.close_all()
        proxy.black_hole()
        began = time.monotonic()
        with pytest.raises(pw.OperationalError, match="timeout expired"):
            database.connect()
        assert time.monotonic() - began < LIMIT

        proxy.passing()
        database.connect()

        assert my_pid()


@whole_only
def test_a_second_host_is_reached_while_the_first_does_not_answer(opened, urls):
    proxy, url = postgres_through(urls.database)
    with proxy, Proxy(proxy._target) as living:
        proxy.black_hole()

        opened(url.replace(f":{proxy.port}", f":{proxy.port},127.0.0.1:{living.port}"))

        assert living.connections == 1


# Prepared statements


def added(one, other):
    return execute_prepared("add", STATEMENT, {"one": one, "other": other}).fetchone()


def names():
    return [name for name, _ in database.execute_sql(PREPARED).fetchall()]


def test_a_statement_is_prepared_once_and_executed_with_each_values(database):
    assert [added(1, 2), added(3, 4)] == [(3, "100 %"), (7, "100 %")]
    ((name, statement),) = database.execute_sql(PREPARED).fetchall()
    assert statement == f"prepare {name} as select $1::bigint + $2::bigint, '100 %'"


def test_what_stands_before_it_is_of_the_same_transaction(database):
    statement = "select current_setting('enable_bitmapscan')"

    found = [execute_prepared("look", statement, {}, prefix="set local enable_bitmapscan = off; ") for _ in range(2)]

    assert [cursor.fetchone() for cursor in found] == [("off",), ("off",)]
    assert database.execute_sql(statement).fetchone() == ("on",)


def test_a_statement_that_a_pooler_has_taken_away_is_executed_all_the_same(database):
    added(1, 2)
    database.execute_sql("deallocate all")

    assert added(3, 4) == (7, "100 %")
    assert (added(5, 6), names()) == ((11, "100 %"), [])


def test_a_statement_that_fails_for_another_reason_is_not_executed_twice(database):
    database.execute_sql("create temp sequence counted")
    statement = "select nextval('counted') / %(by)s::bigint"
    execute_prepared("divide", statement, {"by": 1})

    with pytest.raises(Exception, match="division by zero"):
        execute_prepared("divide", statement, {"by": 0})

    assert database.execute_sql("select last_value from counted").fetchone() == (2,)


def keep(number, by=1):
    """Return a statement that keeps a number; it fails if *by* is 0."""
    return Statement(
        "keep", "insert into kept select %(number)s::bigint / %(by)s::bigint", {"number": number, "by": by}
    )


def test_each_statement_of_a_request_has_its_own_values(database):
    database.execute_sql("create temp table kept (number bigint)")

    for _ in range(2):
        execute_in_one_request([keep(1), keep(2)])

    assert database.execute_sql("select number from kept").fetchall() == [(1,), (2,), (1,), (2,)]
    assert len(names()) == 1


@pytest.mark.parametrize("prepared", [False, True])
def test_a_request_that_fails_changes_nothing(database, prepared):
    database.execute_sql("create temp table kept (number bigint)")
    if prepared:
        execute_in_one_request([keep(0)])

    with pytest.raises(Exception, match="division by zero"):
        execute_in_one_request([keep(1), keep(2, by=0)])

    assert database.execute_sql("select number from kept where number > 0").fetchall() == []


def test_no_statement_is_compiled_however_dear_its_plan_looks(opened):
    opened()

    assert database.execute_sql("show jit").fetchone() == ("off",)


def test_what_is_committed_survives_a_crash_of_a_server_that_waits_for_no_commit(opened, tmp_path):
    folder = tmp_path / "servers"
    with run_servers(folder, postgres_options={"synchronous_commit": "off", "wal_writer_delay": "10s"}) as running:
        opened(running.database_url)
        database.execute_sql("create table kept as select 1 as number")
        os.kill(running.postgres_pid, signal.SIGQUIT)

    with run_servers(folder) as running:
        opened(running.database_url)
        assert database.execute_sql("select number from kept").fetchall() == [(1,)]
