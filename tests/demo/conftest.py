import os
import signal
import subprocess
import sys
import tempfile
from contextlib import closing, suppress
from pathlib import Path
from uuid import uuid4

import psycopg2
import pytest
from redis import Redis

from forgekeeper.platform.settings import PREFIX
from tests.harness.waiting import wait_until

ROOT = Path(__file__).parents[2]
MARK = "DEMO_MARK"
LIMIT = 60.0
START_LIMIT = 120.0
"""Seconds that two busy cores may need for a tour, or to create a database and start all processes."""
COMMAND = ("-P", "-m", "forgekeeper.cli")
HOST = """
import os, signal, sys, time
from pathlib import Path
from demo.servers import run_servers
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
with run_servers(Path(sys.argv[1]) if sys.argv[1] else None) as s:
    print(s.database_url, flush=True)
    exec(sys.argv[2])
    time.sleep(600)
"""


class Program:
    """A Python process with identifiable temporary files and descendants."""

    def __init__(self, parent, *words, folder=None, **settings):
        self.folder = folder
        self.temporary = Path(tempfile.mkdtemp(prefix="t", dir=parent))
        self.output = self.temporary.with_suffix(".out")
        self._mark = uuid4().hex
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        own = {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.temporary), MARK: self._mark}
        own |= {f"{PREFIX}METRICS_PORT_{process}": "0" for process in ("WORKER", "SCHEDULER", "EXPORTER")}
        own[f"{PREFIX}CONSOLE_PORT"] = "0"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *words],
                cwd=folder or self.temporary,
                env=inherited | own | {PREFIX + name: value for name, value in settings.items()},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def said(self):
        return self.output.read_text()

    def says(self, text):
        return (
            wait_until(lambda: text in self.said or self.process.poll() is not None, START_LIMIT) and text in self.said
        )

    def ends(self, signal_number=None):
        if signal_number:
            self.process.send_signal(signal_number)
        return self.process.wait(START_LIMIT)

    def pids(self):
        """Return the ids of processes that have inherited the mark or work in the folders.

        Servers overwrite their environment, and with it the mark, with their titles.
        """
        return [int(process.name) for process in Path("/proc").glob("[0-9]*") if self._is_ours(process)]

    def process_table(self):
        """Return the command lines of these processes."""
        lines = []
        for pid in self.pids():
            with suppress(OSError):  # it has ended
                lines.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
        return lines

    def _is_ours(self, process):
        with suppress(OSError):  # it has ended
            if f"{MARK}={self._mark}".encode() in (process / "environ").read_bytes():
                return True
            place = (process / "cwd").readlink()
            return any(place.is_relative_to(folder) for folder in (self.folder, self.temporary) if folder)
        return False

    def leaves_no_process(self):
        return wait_until(lambda: not self.pids(), LIMIT)

    def leaves_nothing(self):
        return self.leaves_no_process() and wait_until(lambda: not any(self.temporary.iterdir()), LIMIT)

    def kill(self):
        self.process.kill()
        self.process.wait()
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Start programs, and kill all their processes at the end."""
    programs, parent = [], tmp_path_factory.mktemp("w")

    def begin(*words, **options):
        programs.append(Program(parent, *words, **options))
        return programs[-1]

    yield begin
    for program in programs:
        program.kill()


@pytest.fixture(scope="module")
def start(run):
    """Start `forgekeeper` commands."""
    return lambda *words, **options: run(*COMMAND, *words, **options)


@pytest.fixture
def host(run):
    """Start processes that run the servers, in a folder if given, and then execute the code *then*."""

    def begin(folder="", then="", *, ready=True):
        program = run("-c", HOST, str(folder), then)
        assert not ready or program.says("postgresql:"), program.said
        return program

    return begin


@pytest.fixture(scope="module")
def query():
    """Execute SQL in the database at a URL; return the rows, if any."""

    def ask(url, sql):
        with closing(psycopg2.connect(url)) as connection, connection, connection.cursor() as cursor:
            cursor.execute(sql)
            return cursor.fetchall() if cursor.description else []

    return ask


@pytest.fixture
def redis():
    """Execute a command in the Redis at a URL."""

    def ask(url, *command):
        with Redis.from_url(url) as client:
            return client.execute_command(*command)

    return ask


@pytest.fixture
def temporary_root(monkeypatch):
    """A folder for temporary files whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="t", ignore_cleanup_errors=True) as short:
        monkeypatch.setenv("TMPDIR", short)
        monkeypatch.setattr("tempfile.tempdir", None)
        yield Path(short)
