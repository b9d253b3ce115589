"""A database that hangs while its kernel answers is given up by its clients; one that is only slow is not."""

import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from queue import SimpleQueue

import peewee as pw
import psycopg2
import pytest
from apscheduler.schedulers.blocking import BlockingScheduler
from playhouse.pool import MaxConnectionsExceeded
from pydantic import SecretStr

from demo.servers import folder
from forgekeeper import migrations
from forgekeeper.batches import BATCHES
from forgekeeper.connections import Limits, client, connect
from forgekeeper.database import Patience, database, open_pool, promptly, reachable, release, unhurried, watch
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.reports import COUNT
from scheduler import Loop, _keep_heartbeat
from tests.harness.frozen import Server
from tests.harness.ledger import start_run
from tests.harness.waiting import wait_until

from .system.proxy import Proxy, postgres_through

BATCH = "user_status_cleanup"
LIMIT = 30.0
SECOND = timedelta(seconds=1)
SILENT = 2 * SECOND
"""For so long nobody may have an answer where a test names no other time: a busy machine answers within it."""
PATIENT = 3 * SECOND
SLOW = "select 7 from pg_sleep(4)"
SLACK = 10.0
"""Seconds that a busy machine may add, and that the server's own limits are away from ours."""
ALIVE = "select count(*) from pg_stat_activity where pid = %s"


@pytest.fixture(scope="module")
def server():
    with ExitStack() as stack:
        server = Server(stack.enter_context(folder.opened(None)), max_connections="10")
        stack.callback(server.stop)
        yield server


@pytest.fixture
def opened(server):
    """Open a pool on the server, with a short limit where a test names no other; this thread has a connection."""
    with ExitStack() as stack:

        def make(url=None, *, size=3, connect=30 * SECOND, statement=60 * SECOND, network=SILENT):
            patience = Patience(connect, statement, SECOND, 60 * SECOND, network)
            open_pool(url or server.url, patience, name="tests", size=size)
            stack.callback(database.close_all)
            database.connect()
            return my_pid()

        yield make


@pytest.fixture
def ledger(opened):
    opened()
    migrations.migrate(database.obj)
    database.execute_sql("truncate job_runs, batches, holds")


def my_pid():
    return database.execute_sql("select pg_backend_pid()").fetchone()[0]


def silent(statement="select 1"):
    """Execute a statement that is not answered; return what is said and after how many seconds."""
    began = time.monotonic()
    with pytest.raises(pw.OperationalError) as failure:
        database.execute_sql(statement)
    return str(failure.value), time.monotonic() - began


def in_thread(work):
    """Do *work* in a thread with its own connection; return the thread and the list that will have the answer."""
    answers = []

    def body():
        try:
            answers.append(work())
        except (pw.PeeweeException, MaxConnectionsExceeded) as error:
            answers.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread, answers


def test_a_statement_on_a_server_that_hangs_fails_after_the_network_s_timeout(server, opened):
    opened()

    with server.frozen():
        said, seconds = silent()

    assert "has not answered for" in said
    assert 2 <= seconds < SLACK


def test_the_connection_of_a_statement_that_was_given_up_is_thrown_away_and_the_next_one_works(server, opened):
    before = opened(size=1)
    with server.frozen():
        silent()
    assert not reachable()

    release()
    database.connect()

    assert my_pid() != before


def test_a_slow_statement_on_a_server_that_lives_is_waited_for(opened):
    opened(network=PATIENT)

    # Nobody but the watch asks this server anything meanwhile.
    assert database.execute_sql(SLOW).fetchone() == (7,)


def test_a_slow_statement_is_waited_for_where_the_server_has_no_connection_left_to_ask_it_by(server, opened):
    opened(network=PATIENT)

    with hoarded(server.url):
        assert database.execute_sql(SLOW).fetchone() == (7,)


@contextmanager
def hoarded(url):
    """Take all connections that there are."""
    with ExitStack() as stack:
        with suppress(psycopg2.OperationalError):
            while True:
                stack.enter_context(closing(psycopg2.connect(url)))
        yield


def test_a_statement_whose_own_server_process_hangs_fails_once_a_living_one_would_have_ended_it(server, opened):
    mine = opened(statement=SECOND, network=LIMIT * SECOND)

    with server.frozen(mine):
        _said, seconds = silent()

    assert 1 + watch.MARGIN <= seconds < SLACK


def test_a_statement_that_is_always_quick_fails_after_the_network_s_timeout_though_others_are_answered(server, opened):
    mine = opened(statement=LIMIT * SECOND, network=SILENT)

    with server.frozen(mine), promptly():
        _said, seconds = silent()

    assert 2 <= seconds < SLACK


def test_a_statement_without_hurry_may_take_longer_than_statements_may(opened):
    opened(statement=SECOND, network=LIMIT * SECOND)
    database.execute_sql("set statement_timeout = 0")

    with unhurried():
        assert database.execute_sql("select 7 from pg_sleep(2.5)").fetchone() == (7,)


def test_a_commit_that_is_not_answered_fails_and_what_follows_has_a_new_connection(server, opened):
    opened()
    database.execute_sql("create table if not exists committed (number int)")
    database.begin()
    database.execute_sql("insert into committed values (1)")

    with server.frozen(), pytest.raises(pw.OperationalError, match="has not answered"):
        database.commit()
    release()
    database.connect()

    assert database.execute_sql("select count(*) from committed").fetchone()[0] in {0, 1}
    assert reachable()


def test_a_closing_that_the_frozen_server_does_later_is_not_done_twice(server, ledger):
    run = JobRun.start_here(BATCH, by="test")
    with server.frozen(my_pid()), promptly(), pytest.raises(pw.OperationalError):
        JobRun.succeed(run, {"deleted": 1})
    release()
    database.connect()
    assert wait_until(lambda: JobRun.get_by_id(run.id).state == "succeeded", LIMIT), "it was not done after all"

    assert not JobRun.succeed(run, {"deleted": 2})
    assert JobRun.get_by_id(run.id).result == {"deleted": 1}


def test_a_closing_that_the_frozen_server_does_when_another_has_the_run_changes_nothing(server, ledger):
    run, frozen = JobRun.start_here(BATCH, by="first"), my_pid()
    with server.frozen(frozen):
        with promptly(), pytest.raises(pw.OperationalError):
            JobRun.succeed(run, {"deleted": 1})
        release()
        database.connect()
        JobRun.reopen_lost(BATCH, dead_after=timedelta(0))
        second = start_run(BATCH, run.id, by="second")

    assert wait_until(lambda: database.execute_sql(ALIVE, (frozen,)).fetchone() == (0,), LIMIT)
    row = JobRun.get_by_id(run.id)
    assert (row.state, row.attempt, row.started_by) == ("started", second.attempt, "second")


def test_nobody_waits_for_a_thread_that_connects_to_a_server_that_hangs(server, opened):
    mine = opened(size=2)

    with server.frozen(server.postmaster()):
        connecting, answers = in_thread(database.connect)
        assert wait_until(lambda: database.obj._making == 1, LIMIT), "it does not connect"
        release()
        database.connect()
        taken = my_pid()
        still_connecting = connecting.is_alive()

    connecting.join(LIMIT)
    assert still_connecting
    assert taken == mine
    assert answers == [True]


def test_a_place_in_the_pool_is_free_again_when_connecting_has_failed(server, opened):
    opened(size=1, connect=5 * SECOND)
    database.close_all()
    with server.frozen(), pytest.raises(pw.OperationalError, match="timeout expired"):
        database.connect()

    database.connect()

    assert my_pid()


def test_no_more_connections_are_made_than_the_pool_has(server, opened):
    opened(size=1, connect=3 * SECOND)

    thread, answers = in_thread(database.connect)

    thread.join(LIMIT)
    assert isinstance(answers[0], MaxConnectionsExceeded)


def test_a_statement_is_watched_also_when_there_has_been_none_for_long(server, opened, monkeypatch):
    monkeypatch.setattr(watch, "IDLE", 0.1)
    opened()
    assert wait_until(lambda: database.obj.watch._thread is None, LIMIT), "the thread stays"

    with server.frozen():
        said, _seconds = silent()

    assert "has not answered" in said


def test_a_second_host_is_reached_while_the_first_hangs(server, opened):
    proxy, url = postgres_through(server.url)
    with proxy, Proxy(proxy._target) as living:
        proxy.black_hole()

        opened(url.replace(f":{proxy.port}", f":{proxy.port},127.0.0.1:{living.port}"), connect=5 * SECOND)

        assert living.connections == 1


def test_a_scheduler_s_heartbeat_is_as_old_as_the_turn_that_gets_no_answer(server, ledger, settings):
    own = settings.model_copy(update={"database_url": SecretStr(server.url), "scheduler_timeout": SECOND})
    connect(own, Limits.of_scheduler(own), name="tests", connections=None)
    loop = Loop(BATCHES[BATCH], own, broken=threading.Event(), asked=SimpleQueue())
    clock = BlockingScheduler(timezone="UTC")
    _keep_heartbeat(clock, [loop])

    def age():
        clock.get_job("heartbeat").func()
        return time.time() - COUNT.registry.get_sample_value("forgekeeper_scheduler_heartbeat_timestamp_seconds")

    loop.turn()
    assert loop.stands_still == 0
    with server.frozen():
        loop.turn()
        assert loop.stands_still >= 1
        assert age() >= 1
    loop.turn()
    assert loop.stands_still == 0
    database.close()
    client.connection_pool.disconnect()
