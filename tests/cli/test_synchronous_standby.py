"""A synchronous standby is gone: stops and holds work at once, and a command that waits says for what."""

import subprocess
import sys
import threading
from contextlib import closing

import psycopg2
import pytest

from demo.servers import run_servers
from tests.harness.thorough import whole_only
from tests.harness.waiting import wait_until

NAME, LIMIT = "user_status_cleanup", 60.0


OPTIONS = {"max_wal_senders": "2", "wal_level": "replica", "synchronous_commit": "on"}


@pytest.fixture(scope="module")
def replicating():
    """Servers of which PostgreSQL could have a standby: those of the other tests cannot."""
    with run_servers(postgres_options=OPTIONS) as running:
        yield {"DATABASE_URL": running.database_url, "REDIS_URL": running.redis_url}


@pytest.fixture
def without_standby(replicating, main):
    """Let each commit wait for a standby that is not there; return the settings, and what lets them go on."""
    for words in ("migrate", "seed", f"release {NAME} --reason test", f"resume {NAME}"):
        assert main(*words.split(), **replicating).status == 0
    with closing(psycopg2.connect(replicating["DATABASE_URL"])) as connection, connection.cursor() as cursor:
        connection.autocommit = True

        def let(names):
            cursor.execute("alter system set synchronous_standby_names = %s", (names,))
            cursor.execute("select pg_reload_conf()")

        let("gone")
        # Commits wait once the server's checkpointer has heard of it.
        ended = threading.Event()
        probe = threading.Thread(target=commit_until, args=(ended, replicating["DATABASE_URL"]))
        probe.start()
        assert wait_until(lambda: waiting(cursor), LIMIT)
        yield replicating, lambda: let("")
        ended.set()
        let("")
        probe.join()


def commit_until(ended, url):
    with closing(psycopg2.connect(url)) as connection, connection.cursor() as cursor:
        while not ended.is_set():
            cursor.execute("create table probe (); drop table probe")
            connection.commit()


def waiting(cursor):
    cursor.execute("select count(*) from pg_stat_activity where wait_event = 'SyncRep'")
    return cursor.fetchone()[0]


@whole_only
@pytest.mark.parametrize("command", ["pause", "stop"])
def test_a_stop_or_hold_is_in_force_at_once_and_says_that_no_standby_has_it(main, without_standby, query, command):
    settings, _go_on = without_standby
    result = main(command, NAME, "--reason", "wrong rows go", **settings)

    assert (result.status, query(settings["DATABASE_URL"], "select kind from holds where kind <> 'new'")) == (
        0,
        [(command,)],
    )
    assert "the hold is in force, but no synchronous standby has received it" in result.stderr


@whole_only
def test_a_run_that_waits_for_a_standby_says_so_and_goes_on_once_it_may(environment, without_standby, tmp_path):
    settings, go_on = without_standby
    line = [sys.executable, "-m", "forgekeeper.cli", "run", NAME, "--json"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    with subprocess.Popen(line, env=environment(**settings), cwd=tmp_path, text=True, **streams) as process:
        said = next(line for line in process.stderr if not line.startswith("{"))
        go_on()
        out, _err = process.communicate()

    assert said.startswith("PostgreSQL waits for a synchronous standby, and none answers")
    assert (process.returncode, '"deleted": ' in out) == (0, True)
