"""How processes take the signals that ask them to end, when these come at the worst of moments."""

import subprocess
import sys
from pathlib import Path

import pytest

FORKED = """
import multiprocessing, os, signal, sys
from forgekeeper import shutdown
from forgekeeper.process import signals

again = []

def once_more(frame, event, _):
    if (event, frame.f_code.co_name) == ("call", "first"):
        sys.setprofile(None)
        again.append("again")
        os.kill(os.getpid(), signal.SIGTERM)

def worker():
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append("told"))
    signals.follow()
    sys.setprofile(once_more)
    os.kill(os.getpid(), signal.SIGTERM)
    print(again, told, shutdown.requested.is_set(), flush=True)

process = multiprocessing.get_context("fork").Process(target=worker)
process.start()
process.join()
"""
"""A second signal arrives before a line has been done of what the first one leads to."""


ASKED = """
import os, signal, sys
from forgekeeper import shutdown

left = 50

def storm(frame, event, _):
    global left
    if left and event in ("call", "c_call"):
        left -= 1
        os.kill(os.getpid(), signal.SIGTERM)

asked = shutdown.requests()
sys.setprofile(storm)
while left:
    os.kill(os.getpid(), signal.SIGTERM)
sys.setprofile(None)
asked.get()
print(asked.empty())
"""
"""Another signal arrives at each step of what the one before leads to."""


MASTER = """
import multiprocessing, os, signal, sys, time
from datetime import timedelta
from forgekeeper.process.master import Vigil, overseen

def deaf():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.close(1)
    os.close(2)
    time.sleep(10)

Process = overseen(Vigil(timedelta(seconds=1)))
# The master's signal comes before it has a handler, as while Dramatiq starts its processes.
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
child = Process(target=deaf)
child.start()
os.kill(os.getpid(), signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda *_: None)
{kernel}
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
while child.exitcode is None:
    child.join(1)
print("killed" if child.exitcode == -signal.SIGKILL else "ended")
"""
"""A master whose process takes no notice of SIGTERM."""


def python(program):
    """Run a program in a process of its own; return what it has printed."""
    root = Path(__file__).parents[1]
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def test_two_signals_at_once_ask_dramatiq_to_end_but_once():
    assert python(FORKED) == "['again'] ['told'] True"


def test_signals_in_the_middle_of_a_signal_keep_no_process_from_hearing_them():
    assert python(ASKED) == "False"


def test_a_master_kills_a_process_that_is_deaf_to_a_signal_that_came_while_it_started():
    assert python(MASTER.format(kernel="")).splitlines()[-1] == "killed"


def test_a_master_does_not_wait_for_a_process_that_the_kernel_does_not_end():
    with pytest.raises(subprocess.CalledProcessError) as ended:
        # So it looks where one waits for a disk.
        python(MASTER.format(kernel="child.kill = lambda: None"))

    assert ended.value.returncode == 1
    assert "left processes behind" in ended.value.stdout
