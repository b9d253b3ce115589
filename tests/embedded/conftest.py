import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg2
import pytest
from redis import Redis

from forgekeeper.embedded.waiting import wait_until

ROOT = Path(__file__).parents[2]
LIMIT = 60.0

# A process that runs the servers and says where they are; what it does then is told in its second argument.
HOST = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from forgekeeper.embedded import servers
# Whoever runs the tests in the background may have us ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
with servers(Path(sys.argv[1]) if sys.argv[1] else None) as s:
    print(json.dumps([str(s.folder), s.database_url, s.redis_url, s.postgres_pid, s.redis_pid]), flush=True)
    exec(sys.argv[2])
    sys.stdin.read()
"""


class Host:
    def __init__(self, folder="", then="", **environment):
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOST, str(folder), then],
            env={**os.environ, "PYTHONPATH": path, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    @property
    def starting_keeper_pid(self):
        return int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text())

    def ready(self):
        where = json.loads(self.process.stdout.readline())
        self.folder = Path(where[0])
        self.database_url, self.redis_url = where[1:3]
        self.server_pids = where[3:5]
        self.keeper_pid = parent_of(where[4])
        return self

    def says(self):
        return self.process.stdout.readline().decode().strip()

    def die(self, signal_number=signal.SIGKILL):
        self.process.send_signal(signal_number)
        self.process.wait()

    def leave(self):
        self.process.stdin.close()
        return self.process.wait(LIMIT)

    def everything_is_gone(self):
        return wait_until(
            lambda: all(map(gone, [self.keeper_pid, *self.server_pids])) and not self.folder.exists(), LIMIT
        )


def parent_of(pid):
    return int(stat(pid)[1])


def gone(pid):
    # A zombie is gone: nobody may be there to collect it.
    try:
        return stat(pid)[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def stat(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


@pytest.fixture
def host():
    """Start processes that run the servers, and kill what is left of them in the end."""
    hosts = []

    def start(*arguments, **options):
        hosts.append(Host(*arguments, **options))
        return hosts[-1]

    yield start
    for started in hosts:
        started.process.kill()
        started.process.wait()
        started.process.stdin.close()
        started.process.stdout.close()


@pytest.fixture
def short_folder():
    """Make a folder of a short name, within which the sockets of servers fit.

    Those of a longer one are elsewhere, and whoever is killed at its start leaves them there.
    """
    with TemporaryDirectory(prefix="t", ignore_cleanup_errors=True) as short:
        yield Path(short)


@pytest.fixture
def temporary_root(short_folder, monkeypatch):
    """Make temporary folders appear in a folder of our own, where we see what remains."""
    monkeypatch.setenv("TMPDIR", str(short_folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return short_folder


@pytest.fixture
def eventually():
    """Say whether a condition comes to hold within the time we have."""
    return lambda condition: wait_until(condition, LIMIT)


@pytest.fixture(name="gone")
def gone_fixture():
    return gone


@pytest.fixture(name="parent_of")
def parent_of_fixture():
    return parent_of


@pytest.fixture
def query():
    """Ask the database at a URL; return the first row, where there are rows."""

    def ask(url, sql):
        with closing(psycopg2.connect(url)) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(sql)
                return cursor.fetchone() if cursor.description else None

    return ask


@pytest.fixture
def redis_client():
    """Open Redis clients that are closed in the end."""
    clients = []

    def connect(url):
        clients.append(Redis.from_url(url))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()
