"""PgBouncer between a process and PostgreSQL: all settings are in force, in each mode that allows transactions."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from subprocess import PIPE
from threading import Barrier
from urllib.parse import urlsplit

import peewee as pw
import psycopg2
import pytest

from forgekeeper.audit.deletions import Audit
from forgekeeper.cli.check import collect_findings
from forgekeeper.cli.commands import UNREAD_OUTPUT_STATUS
from forgekeeper.platform import database as db
from forgekeeper.platform.database.queries import fetch_pages
from forgekeeper.platform.database.session_settings import Timeouts
from forgekeeper.platform.database.sessions import (
    WritesByItself,
    execute_prepared,
    open_pool,
    read_only_session,
    write_transaction,
)
from models import CLASS_COUNT
from tests.harness import many_rows
from tests.harness.adopted import VIEWS, adopted  # noqa: F401
from tests.harness.artifacts import destroy_chunk
from tests.harness.every import every
from tests.harness.gitlab_tables import TABLES, rows
from tests.harness.pgbouncer import find_pgbouncer, run_pgbouncer
from tests.harness.thorough import whole_only

from .every_command import arguments, commands, serves

ALL = dict(commands())
SESSIONS = 3
LONG, LIMIT = timedelta(seconds=60), 60.0
RUN, NUMBER_OF_ROWS, ROWS_PER_LINE = 17, 6_400, 50
"""More rows than a pipe takes, in more lines of the audit than a page has."""
SELECT_ARTIFACTS = "select * from ci_job_artifacts order by id"
SELECT_SETTINGS = """
    select pg_backend_pid(), current_setting('statement_timeout'), current_setting('lock_timeout'),
        current_setting('idle_in_transaction_session_timeout'), current_setting('search_path'), current_setting('jit')
"""
CREATE_TABLE = "create table written_through_the_pooler ()"


def require_pgbouncer():
    if find_pgbouncer() is None:
        skip = pytest.fail if os.environ.get("CI") else pytest.skip
        skip("PgBouncer is not installed (Debian: pgbouncer)")


def open_sessions(url):
    """Let the pooler open several sessions, which take turns from then on."""
    together = Barrier(SESSIONS)

    def hold_one(_):
        with closing(psycopg2.connect(url)) as client, client, client.cursor() as cursor:
            cursor.execute("select pg_backend_pid()")
            together.wait()

    with ThreadPoolExecutor(SESSIONS) as threads:
        list(threads.map(hold_one, range(SESSIONS)))


@pytest.fixture(params=["session", "transaction"])
def pooled_url(request, _migrated, urls):
    """URL of the tests' database through PgBouncer, with several open sessions."""
    require_pgbouncer()
    with run_pgbouncer(urls.database, request.param) as url:
        open_sessions(url)
        yield url


@pytest.fixture
def connect(_migrated):
    """Connect the models to a URL, with these time limits."""

    def open_url(url, statement=LONG, lock=LONG):
        open_pool(url, Timeouts(LONG, statement, lock, LONG, LONG), name="tests", size=1)
        db.database.connect()

    yield open_url
    db.database.close_all()


def test_each_transaction_has_all_settings(pooled_url, connect):
    connect(pooled_url, statement=timedelta(seconds=6), lock=timedelta(seconds=2))

    looks = [db.database.execute_sql(SELECT_SETTINGS).fetchone() for _ in range(2 * SESSIONS)]

    assert {look[1:] for look in looks} == {("6s", "2s", "1min", "forgekeeper, public", "off")}


@pytest.mark.parametrize("pooled_url", ["transaction"], indirect=True)
def test_in_transaction_mode_transactions_have_several_sessions(pooled_url, connect):
    connect(pooled_url)

    sessions = {db.database.execute_sql(SELECT_SETTINGS).fetchone()[0] for _ in range(2 * SESSIONS)}

    assert len(sessions) > 1


def test_a_statement_is_cancelled_after_its_time(pooled_url, connect):
    connect(pooled_url, statement=timedelta(seconds=1))

    with pytest.raises(pw.OperationalError, match="statement timeout"):
        db.database.execute_sql("select pg_sleep(600)")


def test_a_statement_waits_for_a_lock_no_longer_than_its_time(pooled_url, connect, other):
    other.execute("lock table user_statuses")
    connect(pooled_url, lock=timedelta(seconds=1))

    with pytest.raises(pw.OperationalError, match="lock timeout"):
        db.database.execute_sql("select from user_statuses")


@pytest.mark.parametrize("pooled_url", ["transaction"], indirect=True)
def test_the_settings_reach_no_other_client(pooled_url, connect, query):
    connect(pooled_url, statement=timedelta(seconds=6))
    with read_only_session("a batch"):
        db.database.execute_sql("select 1")

        found = {query(pooled_url, "select current_setting('statement_timeout')")[0] for _ in range(2 * SESSIONS)}
        query(pooled_url, f"{CREATE_TABLE}; drop table written_through_the_pooler")

    assert found == {("0",)}


def test_a_batch_that_is_asked_for_its_answer_cannot_write(pooled_url, connect):
    connect(pooled_url)

    for _ in range(2 * SESSIONS):
        with pytest.raises(WritesByItself), read_only_session("a batch"):
            db.database.execute_sql(CREATE_TABLE)


def test_the_engine_writes_while_a_batch_cannot(pooled_url, connect):
    connect(pooled_url)

    with read_only_session("a batch"), write_transaction():
        db.database.execute_sql(f"{CREATE_TABLE}; drop table written_through_the_pooler")


def test_pages_of_a_long_answer_are_complete(pooled_url, connect):
    connect(pooled_url)

    pages = list(fetch_pages("numbers", "select * from generate_series(1, %(last)s)", {"last": 250}, size=100))

    assert [len(page) for page in pages] == [100, 100, 50]


def test_between_two_pages_no_transaction_is_open(pooled_url, connect):
    connect(pooled_url)

    pages = fetch_pages("numbers", "select * from generate_series(1, 3)", {}, size=1)

    assert [(page, db.database.connection().is_idle()) for page in pages] == [([(n,)], True) for n in (1, 2, 3)]


def test_nothing_is_prepared(pooled_url, connect):
    connect(pooled_url)

    for _ in range(2 * SESSIONS):
        execute_prepared("one", "select %(one)s::bigint", {"one": 1})

    assert db.database.execute_sql("select count(*) from pg_prepared_statements").fetchone() == (0,)


@pytest.fixture
def large_run(database, store):
    """Number of a run that has deleted thousands of artifacts, and the artifacts' rows."""
    many_rows.artifacts(NUMBER_OF_ROWS)
    before = database.execute_sql(SELECT_ARTIFACTS).fetchall()
    audit = Audit("expired_job_artifacts", on=True, run=RUN)
    for number in range(CLASS_COUNT):
        while destroy_chunk(number, db.now(), limit=ROWS_PER_LINE, grace=LONG, audit=audit).artifacts:
            pass
    assert database.execute_sql(SELECT_ARTIFACTS).fetchall() == []
    return RUN, before


def test_rows_of_a_large_run_are_restored(pooled_url, large_run, main, query, urls):
    run, before = large_run

    kept = main("objects", "keep", "--run", str(run), DATABASE_URL=pooled_url)
    query(urls.database, kept.stdout)

    assert (kept.status, query(urls.database, SELECT_ARTIFACTS)) == (0, before)


@pytest.mark.parametrize("pooled_url", ["transaction"], indirect=True)
def test_a_reader_that_stops_reading_a_large_answer_causes_no_traceback(pooled_url, large_run, environment, tmp_path):
    command = [sys.executable, "-m", "forgekeeper.cli", "objects", "keep", "--run", str(large_run[0])]
    given = environment(DATABASE_URL=pooled_url)
    with subprocess.Popen(command, env=given, cwd=tmp_path, stdout=PIPE, stderr=PIPE) as process:
        process.stdout.readline()
        process.stdout.close()

        assert (process.stderr.read(), process.wait(LIMIT)) == (b"", UNREAD_OUTPUT_STATUS)


@whole_only
@pytest.mark.parametrize("pooled_url", ["transaction"], indirect=True)
@every("command", sorted(name for name, command in ALL.items() if not serves(command)))
def test_a_command_gets_its_answers(pooled_url, own_database, main, command):
    url = urlsplit(pooled_url)._replace(path=urlsplit(own_database).path).geturl()

    result = main(*command.split(), *arguments(command, ALL[command]), DATABASE_URL=url)

    assert not re.search("Traceback|cannot use PostgreSQL", result.stderr), result.stderr


@whole_only
@pytest.mark.parametrize("pooled_url", ["transaction"], indirect=True)
def test_a_forge_is_adopted(pooled_url, adopted, main, settings):  # noqa: F811
    adopted.execute(f"drop schema {VIEWS} cascade")

    result = main("adopt", "gitlab", "--tables", TABLES, FORGE_SCHEMA=VIEWS, DATABASE_URL=pooled_url)

    assert (result.status, rows(adopted, f"select to_regnamespace('{VIEWS}') is null")) == (0, [(False,)])


def test_check_names_the_pooler_and_finds_every_time_limit_in_force(pooled_url, main, settings):
    checked = main("check", "--json", DATABASE_URL=pooled_url)

    assert [level for level, _ in checked.findings("pooler") + checked.findings("timeouts")] == ["ok", "ok"]


def test_check_names_a_time_limit_that_something_on_the_way_has_dropped(settings, connect, urls):
    connect(urls.database)
    # A pooler that hides its own process numbers and resets a session between two transactions.
    db.database.execute_sql("reset all")

    found = [one for one in collect_findings(settings) if one.subject == "timeouts" and one.level == "error"]

    assert [one.message.split(" a pooler")[0] for one in found] == [
        "statement_timeout is 0 instead of 60000:",
        "lock_timeout is 0 instead of 60000:",
        "idle_in_transaction_session_timeout is 0 instead of 60000:",
    ]


def test_statement_mode_is_refused_with_a_sentence(main, settings, urls):
    require_pgbouncer()
    with run_pgbouncer(urls.database, "statement") as url:
        complaint = main("status", DATABASE_URL=url).complaint

    assert "is a pooler in statement mode, which must become transaction mode" in complaint


def test_a_pooler_that_refuses_the_options_of_a_url_is_named(main, settings, urls):
    require_pgbouncer()
    with run_pgbouncer(urls.database, "transaction") as url:
        complaint = main("status", DATABASE_URL=f"{url}&options=-c%20jit%3Don").complaint

    assert complaint.endswith("a pooler refuses an option of the URL: remove it from FORGEKEEPER_DATABASE_URL")
