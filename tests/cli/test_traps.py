"""A folder may be anybody's: no command runs what lies in the one where it is started; `demo` and `up` are in tests/demo."""

import signal
import subprocess
import sys

import pytest

from forgekeeper.platform.installation import INSTALLATION_KEY
from tests.harness.ports import free_ports
from tests.harness.thorough import whole_only
from tests.harness.traps import Traps
from tests.harness.waiting import scale_timeout, wait_until

PROGRAM = [sys.executable, "-P", "-m", "forgekeeper.cli"]
"""As the console script: the current folder is no place to look in."""
LIMIT = 60.0
READY = "Worker process is ready for action."
SERVING = {"scheduler": "scheduler started", "exporter": "exporter started", "worker": READY}
"""What each says once it serves."""


@pytest.fixture
def begin(environment, urls, new_database, server, tmp_path):
    """Begin a command in a folder, with a database that has all tables; what it says is in a log."""
    urls = {"DATABASE_URL": new_database(), "REDIS_URL": urls.redis}

    def call(name, folder):
        port = {f"METRICS_PORT_{name.upper()}": str(free_ports(1)[0])} if name in SERVING else {}
        variables = environment(WORKER_PROCESSES="1", LOG_FORMAT="json", **urls, **port)
        with (tmp_path / f"{name}.log").open("wb") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            return subprocess.Popen([*PROGRAM, name], env=variables, cwd=folder, **streams)

    assert call("migrate", "/").wait(scale_timeout(LIMIT)) == 0
    yield call
    server.delete(INSTALLATION_KEY)


@whole_only
def test_no_command_runs_what_lies_where_it_is_started(begin, tmp_path):
    (tmp_path / "traps").mkdir()
    traps = Traps(tmp_path / "traps")
    # All that serve begin at once.
    processes = {name: begin(name, traps.folder) for name in SERVING}

    def said(name):
        return (tmp_path / f"{name}.log").read_text()

    def says(name, count=1):
        return wait_until(lambda: said(name).count(SERVING[name]) == count, LIMIT)

    came_up = {name: says(name) for name in SERVING}
    # Dramatiq begins anew, as the program that it was started as.
    processes["worker"].send_signal(signal.SIGHUP)
    came_up["worker again"] = says("worker", 2)
    processes["flags"] = begin("flags", traps.folder)
    for name in SERVING:
        processes[name].send_signal(signal.SIGTERM)
    ended = {name: process.wait(scale_timeout(LIMIT)) for name, process in processes.items()}

    whole = "".join(map(said, processes))
    assert came_up == dict.fromkeys([*SERVING, "worker again"], True), whole
    assert ended == dict.fromkeys([*SERVING, "flags"], 0), whole
    assert traps.sprung() == []
