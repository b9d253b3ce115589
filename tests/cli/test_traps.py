"""A folder may be anybody's: no command runs what lies in the one where it is started; `demo` and `up` are in tests/demo."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from forgekeeper.settings import PREFIX
from forgekeeper.storage.installation import INSTALLATION
from tests.harness.ports import free_ports
from tests.harness.traps import Traps
from tests.harness.waiting import wait_until

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-P", "-m", "forgekeeper.cli"]
"""As the console script: the current folder is no place to look in."""
LIMIT = 60.0
READY = "Worker process is ready for action."
SERVING = {"scheduler": "scheduler started", "exporter": "exporter started", "worker": READY}
"""What each says once it serves."""


@pytest.fixture(scope="module")
def traps(tmp_path_factory):
    return Traps(tmp_path_factory.mktemp("traps"))


@pytest.fixture(scope="module")
def environment(urls, new_database):
    """The environment of a command, with a database of its own that has all tables."""
    url = new_database()
    machine = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    settings = {"DATABASE_URL": url, "REDIS_URL": urls.redis, "WORKER_PROCESSES": "1", "LOG_FORMAT": "json"}
    whole = {**machine, "PYTHONPATH": str(ROOT), **{PREFIX + name: value for name, value in settings.items()}}
    subprocess.run([*PROGRAM, "migrate"], env=whole, cwd="/", check=True, stdout=subprocess.DEVNULL)
    yield whole
    with redis.Redis.from_url(urls.redis) as server:
        server.delete(INSTALLATION)


@pytest.fixture(scope="module")
def served(traps, environment):
    """Let each command that serves begin at once; return what each wrote and its end, the worker began twice."""
    logs, processes = {}, {}
    for name in SERVING:
        own = {f"{PREFIX}METRICS_PORT_{name.upper()}": str(free_ports(1)[0])}
        logs[name] = traps.folder.with_name(f"{name}.log")
        with logs[name].open("wb") as log:
            processes[name] = subprocess.Popen(
                [*PROGRAM, name],
                env=environment | own,
                cwd=traps.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def says(name, count=1):
        return wait_until(lambda: logs[name].read_text().count(SERVING[name]) == count, LIMIT)

    came_up = {name: says(name) for name in SERVING}
    # Dramatiq begins anew, as the program that it was started as.
    processes["worker"].send_signal(signal.SIGHUP)
    came_up["worker again"] = says("worker", 2)
    processes["flags"] = subprocess.Popen([*PROGRAM, "flags"], env=environment, cwd=traps.folder)
    for name in SERVING:
        processes[name].send_signal(signal.SIGTERM)
    ended = {name: process.wait(LIMIT) for name, process in processes.items()}
    return came_up, ended, {name: log.read_text() for name, log in logs.items()}


def test_no_command_runs_what_lies_where_it_is_started(traps, served):
    came_up, ended, said = served

    assert came_up == dict.fromkeys([*SERVING, "worker again"], True), said
    assert ended == dict.fromkeys([*SERVING, "flags"], 0), said
    assert traps.sprung() == []
