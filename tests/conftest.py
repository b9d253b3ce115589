"""Real servers for all tests: started once, and emptied before each test that uses them.

TEST_DATABASE_URL and TEST_REDIS_URL name other servers instead of the embedded servers.  Tests empty that database, too.
With TEST_POOL_MODE (session, transaction), PgBouncer is between the tests and the embedded PostgreSQL.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

import hypothesis
import psycopg2
import pytest
from hypothesis.configuration import set_hypothesis_home_dir

from demo.servers import run_servers
from demo.servers.machine import find_bundled_redis
from demo.tables import make_tables
from forgekeeper.delivery.broker import load_batches
from forgekeeper.platform import database as db
from forgekeeper.platform import migrations
from forgekeeper.platform.connections import ServerTimeouts, client, configure_clients
from forgekeeper.platform.installation import Installation
from forgekeeper.platform.settings import PREFIX, Settings
from tests.harness import logs
from tests.harness.forks import FORKS
from tests.harness.installation import INSTALLATION
from tests.harness.pgbouncer import run_pgbouncer
from tests.harness.settings import settings_with
from tests.harness.tables import empty
from tests.harness.thorough import SEARCHES

load_batches()
# A shell that starts the tests in the background makes them and their child processes ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Autovacuum releases its lock for a waiting session only after `deadlock_timeout`, which is by default as long as our lock
# timeout: emptying a table during autovacuum would fail.
OPTIONS = {"deadlock_timeout": "100ms"}
DAY = 86_400


def pytest_configure(config: pytest.Config) -> None:
    """Let Hypothesis write into a temporary folder instead of the checkout."""
    logs.use_plain_format()
    folder = TemporaryDirectory(prefix="forgekeeper-hypothesis-")
    config.add_cleanup(folder.cleanup)
    config.add_cleanup(FORKS.close)
    set_hypothesis_home_dir(folder.name)
    # Hypothesis must not report slow examples on a busy machine.
    patient = hypothesis.settings(
        deadline=None, database=None, derandomize=not SEARCHES, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.register_profile("patient", patient)
    hypothesis.settings.load_profile("patient")


@dataclass(frozen=True)
class Urls:
    """URLs of the servers of this test session."""

    database: str
    redis: str


@pytest.fixture(scope="session")
def urls() -> Iterator[Urls]:
    if "TEST_DATABASE_URL" in os.environ:
        yield Urls(os.environ["TEST_DATABASE_URL"], os.environ["TEST_REDIS_URL"])
        return
    # The oldest supported Redis; CI also runs the tests with a newer version.
    with run_servers(postgres_options=OPTIONS, redis=find_bundled_redis()) as running, ExitStack() as stack:
        database_url = running.database_url
        if mode := os.environ.get("TEST_POOL_MODE"):
            # Some tests name a search_path in the URL.
            ignore = "ignore_startup_parameters = options"
            database_url = stack.enter_context(run_pgbouncer(database_url, mode, ignore))
        yield Urls(database_url, running.redis_url)


@pytest.fixture(autouse=True)
def no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    for name in os.environ:
        if name.startswith(PREFIX):
            monkeypatch.delenv(name)
    for process in ("WORKER", "SCHEDULER", "EXPORTER"):
        # Tests run in parallel: a test that needs an endpoint sets a port of its own.
        monkeypatch.setenv(f"{PREFIX}METRICS_PORT_{process}", "0")
    monkeypatch.setenv(f"{PREFIX}CONSOLE_PORT", "0")
    # Tables of tests are small and mostly due, so the circuit breaker is off except in its own tests.
    monkeypatch.setenv(f"{PREFIX}BREAKER_SHARE", "1")
    # A test that destroys artifacts also deletes their objects.
    monkeypatch.setenv(f"{PREFIX}OBJECT_GRACE", "0")
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))


@pytest.fixture
def fast_folder() -> Iterator[Path]:
    """Create a folder in memory if possible: git creates a file for each ref that it deletes."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(prefix="forgekeeper-", dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
def settings(urls: Urls, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings with the URLs of the test servers, which are also set in the environment for child processes."""
    monkeypatch.setenv(PREFIX + "DATABASE_URL", urls.database)
    monkeypatch.setenv(PREFIX + "REDIS_URL", urls.redis)
    return settings_with()


@pytest.fixture
def other(urls: Urls) -> Iterator[psycopg2.extensions.cursor]:
    """Cursor of another session, in a transaction."""
    with closing(psycopg2.connect(urls.database)) as connection, connection.cursor() as cursor:
        yield cursor
        # Closing a connection does not wait until the server has released its locks.
        connection.rollback()


@pytest.fixture(scope="session")
def _migrated(urls: Urls) -> None:
    settings = settings_with(database_url=urls.database, redis_url=urls.redis)
    configure_clients(settings, ServerTimeouts.for_worker(settings), name="tests", connections=1)
    with db.database.connection_context():
        db.database.execute_sql(
            "drop schema public cascade; create schema public; drop schema if exists forgekeeper cascade"
        )
        migrations.apply_pending(db.database.obj)
        make_tables(db.database.obj)
        Installation.update(id=INSTALLATION).execute()


@pytest.fixture
def database(_migrated: None, settings: Settings) -> Iterator[db.database.__class__]:
    """The test database, connected, with empty tables and an empty Redis."""
    # Limits count per day, and the audit has partitions by date: the day must not end during a test.
    while time.time() % DAY > DAY - 10:
        time.sleep(0.1)
    configure_clients(settings, ServerTimeouts.for_worker(settings), name="tests", connections=20)
    with db.database.connection_context():
        empty()
        client.flushdb()
        yield db.database
    db.database.close_all()
    client.connection_pool.disconnect()


@pytest.fixture
def url_with_clock_ahead(database: db.database.__class__, urls: Urls) -> Iterator[Callable[[timedelta], str]]:
    """Return a function that returns a URL of the test database whose clock is ahead by a duration."""

    def make(by: timedelta) -> str:
        shift = f"select pg_catalog.clock_timestamp() + interval '{by.total_seconds()} s'"
        for statement in (
            "create schema if not exists shifted",
            f"create or replace function shifted.clock_timestamp() returns timestamptz language sql as $${shift}$$",
        ):
            database.execute_sql(statement)
        options = quote("-c search_path=public,shifted,pg_catalog")
        return f"{urls.database}{'&' if '?' in urls.database else '?'}options={options}"

    yield make
    database.execute_sql("drop schema if exists shifted cascade")
