import json
import logging
import os
import signal
import sys
import traceback
from contextlib import closing, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from uuid import uuid4

import psycopg2
import pytest
import redis
import structlog

from forgekeeper import cli
from forgekeeper.api.batches import BATCHES
from forgekeeper.cli.check import collect_findings
from forgekeeper.guards.preconditions import Blocked, require_met
from forgekeeper.platform import database as db
from forgekeeper.platform.connections import client
from forgekeeper.platform.installation import INSTALLATION_KEY as OF_REDIS
from forgekeeper.platform.settings import PREFIX
from forgekeeper.targets import sentinel, stores
from tests.harness.adopted import gitlab  # noqa: F401
from tests.harness.forks import run
from tests.harness.git_samples import put_root
from tests.harness.installation import INSTALLATION
from tests.harness.stores import Folder
from tests.harness.supervised import SupervisedProgram

ROOT = Path(__file__).parents[2]


class Result(NamedTuple):
    """Result of a command."""

    status: int
    stdout: str
    stderr: str

    @property
    def json(self):
        return json.loads(self.stdout)

    @property
    def complaint(self):
        """The error of a command that printed nothing else."""
        assert self.stdout == ""
        (line,) = self.stderr.splitlines()
        assert line.startswith("forgekeeper: ")
        return line.removeprefix("forgekeeper: ")

    @property
    def sentences(self):
        """The lines on standard error that are not log lines."""
        return [line for line in self.stderr.splitlines() if not line.startswith("{")]

    def findings(self, subject):
        """Return level and message of the findings of `check` about the subject."""
        return [(one["level"], one["message"]) for one in self.json["findings"] if one["subject"] == subject]


@pytest.fixture
def environment():
    """Return a function that builds the environment of a process; settings lack their prefix, None removes a setting."""

    def build(**settings):
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        values = {**os.environ, "PYTHONPATH": path, **{PREFIX + name: value for name, value in settings.items()}}
        return {name: value for name, value in values.items() if value is not None}

    return build


@pytest.fixture
def forgekeeper(environment, tmp_path):
    """Run `forgekeeper <arguments>` as a process."""

    def call(*arguments, **settings):
        ended = run(["-m", "forgekeeper.cli", *arguments], env=environment(**settings), cwd=tmp_path)
        return Result(ended.returncode, ended.stdout, ended.stderr)

    return call


@pytest.fixture
def start(environment, settings, tmp_path):
    """Start `forgekeeper <arguments>` as a process, and kill it at the end."""
    started = []

    def call(*arguments, **given):
        started.append(SupervisedProgram(tmp_path, environment(LOG_FORMAT="json", **given), *arguments))
        return started[-1]

    yield call
    for one in started:
        one.kill()


@pytest.fixture
def main(environment, monkeypatch):
    """Run `forgekeeper <arguments>` inside this process, and restore the state of the process afterwards."""

    def call(*arguments, **settings):
        pointed, pool = db.database.obj, client.connection_pool
        signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        handlers, configured, config = logging.root.handlers[:], structlog.is_configured(), structlog.get_config()
        out, err = StringIO(), StringIO()
        variables = environment(**settings)
        with monkeypatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr(sys, "argv", ["forgekeeper", *arguments])
            for name in [name for name in os.environ if name.startswith(PREFIX)]:
                patch.delenv(name)
            for name, value in variables.items():
                patch.setenv(name, value)
            try:
                status = cli.run_command()
            except Exception:  # noqa: BLE001, a process would print the traceback, too
                err.write(traceback.format_exc())
                status = 1
            finally:
                if db.database.obj is not pointed:
                    db.database.close_all()
                    client.connection_pool.disconnect()
                if pointed is not None:
                    db.database.initialize(pointed)
                client.connection_pool = pool
                for number, handler in signals.items():
                    signal.signal(number, handler)
                logging.root.handlers[:] = handlers
                structlog.configure(**config) if configured else structlog.reset_defaults()
        return Result(status, out.getvalue(), err.getvalue())

    return call


@pytest.fixture(scope="session")
def query():
    """Execute SQL in the database at a URL; return the rows, if any."""

    def ask(url, sql):
        with closing(psycopg2.connect(url)) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(sql)
                return cursor.fetchall() if cursor.description else []

    return ask


@pytest.fixture(scope="session")
def new_database(urls, query):
    """Create empty databases, each with the whole Redis; return the URL of each."""
    names = []

    def make():
        with closing(redis.from_url(urls.redis)) as server:
            server.delete(OF_REDIS)
        names.append(f"test_{uuid4().hex}")
        query(urls.database, f"create database {names[-1]}")
        return urlsplit(urls.database)._replace(path=f"/{names[-1]}").geturl()

    yield make
    # Databases of embedded servers end with their servers.
    for name in names if "TEST_DATABASE_URL" in os.environ else []:
        query(urls.database, f"drop database {name} with (force)")


@pytest.fixture
def new_role(query):
    """Create roles with only the rights that the SQL grants to ROLE; return the URL of the database for each."""
    made = []

    def make(url, grants=""):
        made.append((url, name := f"r{uuid4().hex}"))
        query(url, f"create role {name} login password '{name}'; {grants.replace('ROLE', name)}")
        if query(url, "select to_regnamespace('forgekeeper')") != [(None,)]:
            query(url, f"grant usage on schema forgekeeper to {name}")
        parts = urlsplit(url)
        return parts._replace(netloc=f"{name}:{name}@{parts.netloc.rpartition('@')[2]}").geturl()

    yield make
    for url, name in made:
        query(url, f"drop owned by {name}; drop role {name}")


@pytest.fixture
def server(urls):
    """Client of the Redis that processes use."""
    with closing(redis.from_url(urls.redis, decode_responses=True)) as server:
        yield server


@pytest.fixture
def refuse_acts(database):
    """Refuse every insert of an act into the audit."""
    database.execute_sql("create trigger unwritten before insert on audit_acts execute function audit_refuse()")
    yield
    database.execute_sql("drop trigger unwritten on audit_acts")


@pytest.fixture(autouse=True)
def restarted():
    """Forget open stores, so that each test behaves like a new process."""
    stores.open_object_store.cache_clear()
    yield
    stores.open_object_store.cache_clear()


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Folder of the store `artifacts`, which the settings name."""
    folder = Folder(tmp_path / "objects")
    folder.write_sentinel(sentinel.build_content(INSTALLATION))
    monkeypatch.setenv(f"{PREFIX}OBJECT_STORES", json.dumps({"artifacts": folder.url}))
    return folder.root


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Root of the repositories, which the settings name."""
    root = put_root(tmp_path / "repositories")
    monkeypatch.setenv(f"{PREFIX}REPOSITORIES_ROOT", str(root))
    return root


@pytest.fixture
def own_database(settings, new_database, main, query):
    """URL of a database with all tables, for tests that damage the tables."""
    url = new_database()
    assert main("migrate", DATABASE_URL=url).status == 0
    assert main("seed", DATABASE_URL=url).status == 0
    query(url, "delete from holds")
    return url


@pytest.fixture
def change(database):
    """Execute SQL that is rolled back after the test."""
    with database.atomic() as everything:
        yield database.execute_sql
        everything.rollback()


@pytest.fixture
def found(settings, change):
    return lambda *subjects: [
        one for one in collect_findings(settings) if one.subject in subjects and one.level != "ok"
    ]


@pytest.fixture
def blocked(settings):
    """Check the preconditions of every batch; return reason and sentence of each blocked batch."""

    def ask():
        sentences = {}
        for name, batch in BATCHES.items():
            try:
                require_met(batch, settings)
            except Blocked as error:
                sentences[name] = (error.reason, str(error))
        return sentences

    return ask
