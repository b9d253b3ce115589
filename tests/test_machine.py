"""What the tests take for the machine's share in a delay."""

import os
import subprocess
import sys

import pytest

from tests.harness.machine import Held
from tests.harness.waiting import wait_until

LIMIT = 60.0
WORK = "import os\nos.sched_setaffinity(0, {int(os.sys.argv[1])})\nwhile True: pass"
pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def at_work():
    """Start processes that want one processor, all the same."""
    processor = str(min(os.sched_getaffinity(0)))
    started = []

    def start(count):
        started.extend(subprocess.Popen([sys.executable, "-S", "-c", WORK, processor]) for _ in range(count))
        return [process.pid for process in started]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_of_two_processes_that_want_one_processor_one_is_always_held_up(at_work):
    pids = at_work(2)
    held = Held(lambda: pids)

    assert wait_until(lambda: held.seconds() > 0.5, LIMIT)
