"""The master of a worker's processes: which signals it hears, and that it waits for nothing for ever."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.thorough import whole_only

ROOT = Path(__file__).parents[2]
PROGRAM = """
import fcntl, multiprocessing, os, signal, sys, termios, time
from datetime import timedelta
from forgekeeper import process as master
from forgekeeper.platform import worker_shutdown
from metrics import logs

logs.configure("json")
master.EXIT_GRACE_SECONDS = 0
signal.signal(signal.SIGTERM, lambda *_: None)
"""
ITS_OWN = """
master.kill_late_processes(timedelta(minutes=1))
child = multiprocessing.Process(target=signal.raise_signal, args=[signal.SIGTERM])
child.start()
child.join()
heard = bytearray(4)
fcntl.ioctl(signal.set_wakeup_fd(-1), termios.FIONREAD, heard)
print(int.from_bytes(heard, sys.byteorder), "signals heard")
"""
HELD = """
multiprocessing.Process.kill = lambda _child: None  # what comes of it where the kernel holds the process
def work():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    worker_shutdown.end_with_parent()
    time.sleep(60)
def begun(_child):
    pass
wait = multiprocessing.Process.join
"""
TAKEN = """
ready = multiprocessing.Lock()
def work():
    ready.acquire()
    os.kill(os.getpid(), signal.SIGKILL)
begun = multiprocessing.Process.join
def wait(_child):
    ready.acquire()
"""
ASKED = """
child = multiprocessing.Process(target=work)
child.start()
begun(child)
master.kill_late_processes(timedelta(0))
signal.raise_signal(signal.SIGTERM)
wait(child)
"""


def run(*parts):
    command = [sys.executable, "-c", "".join((PROGRAM, *parts))]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


@whole_only
def test_a_signal_to_one_process_is_none_to_its_master():
    assert run(ITS_OWN).stdout == "0 signals heard\n"


@whole_only
@pytest.mark.parametrize("waits", [HELD, TAKEN], ids=["held by the kernel", "dead with a lock"])
def test_a_master_does_not_wait_for_ever_for_a_process(waits):
    ended = run(waits, ASKED)

    assert ended.returncode == 1
    assert "worker stopped waiting for its processes" in ended.stderr
