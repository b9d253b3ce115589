"""The faults of other libraries that we patch: a test that fails says that the library no longer needs the patch.

Each is named in the docstring of the module that has the patch.
"""

import errno
import inspect
import io
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from pathlib import Path

import dramatiq.cli
import pytest
from prometheus_client.mmap_dict import MmapedDict

from forgekeeper.process import log_pipes
from tests.harness.waiting import wait_until

LIMIT = 60.0
SIDES = ["Dramatiq's", "ours"]
WATCH_LOGS = dramatiq.cli.watch_logs
KILLED = """
import multiprocessing, os, signal, sys, threading
from forgekeeper.process import ready_pipe

def die_in_the_middle(frame, event, argument):
    # Between two steps of setting it: the first lock is taken, or the pipe's write is about to come.
    if event == "call" and frame.f_code.co_name in {"notify_all", "send_bytes"}:
        os.kill(os.getpid(), signal.SIGKILL)

def child(event):
    sys.setprofile(die_in_the_middle)
    event.set()

if "ours" in sys.argv:
    ready_pipe.install()
event = multiprocessing.Event()
process = multiprocessing.get_context("fork").Process(target=child, args=[event])
process.start()
process.join()
waiting = threading.Thread(target=event.wait, args=[0.01], daemon=True)
waiting.start()
waiting.join(2)
print(process.exitcode, "waits for ever" if waiting.is_alive() else "has waited")
"""
DEAF = """
import threading
from pathlib import Path

import dramatiq
from dramatiq.brokers.stub import StubBroker

class Deaf(dramatiq.Middleware):
    def after_worker_boot(self, broker, worker):
        Path(__file__).with_name("booted").touch()

    def before_worker_shutdown(self, broker, worker):
        Path(__file__).with_name("told").touch()
        threading.Event().wait()

dramatiq.set_broker(StubBroker(middleware=[Deaf()]))
"""


def python(program, *arguments, **environment):
    command = [sys.executable, "-c", program, *arguments]
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        command, cwd=root, env={**os.environ, **environment}, capture_output=True, text=True, check=True, timeout=LIMIT
    )
    return ended.stdout.strip()


# forgekeeper/process/ready_pipe.py


def test_a_master_waits_for_ever_for_a_process_that_was_killed_while_it_said_it_was_ready():
    assert "event = multiprocessing.Event()" in inspect.getsource(dramatiq.cli)
    assert python(KILLED) == "-9 waits for ever"


def test_our_master_has_waited_then():
    assert python(KILLED, "ours") == "-9 has waited"


# forgekeeper/process/master.py


def test_a_master_joins_a_process_that_does_not_end_for_ever(tmp_path):
    (tmp_path / "deaf.py").write_text(DEAF)
    arguments = ["deaf", "--path", str(tmp_path), "--processes", "1", "--threads", "1"]
    master = subprocess.Popen(
        [sys.executable, "-m", "dramatiq", *arguments, "--worker-shutdown-timeout", "100"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert wait_until((tmp_path / "booted").exists, LIMIT)
        master.terminate()
        assert wait_until((tmp_path / "told").exists, LIMIT)

        # It looks once a second, and has looked twice.
        with pytest.raises(subprocess.TimeoutExpired):
            master.wait(2.5)
    finally:
        os.killpg(master.pid, signal.SIGKILL)
        master.wait()


# forgekeeper/process/log_pipes.py


class Full(io.StringIO):
    """A stream on a disk that is full."""

    def write(self, _text):
        raise OSError(errno.ENOSPC, "no space left")


@pytest.fixture
def pipes():
    """What a master hears: its own pipe, which stays open, and those of two processes that ended, one after two words."""
    made = [Pipe(duplex=False) for _ in range(3)]
    (_, own), (_, silent), (_, speaking) = made
    speaking.send_bytes(b"first\n")
    speaking.send_bytes(b"last\n")
    silent.close()
    speaking.close()
    yield [heard for heard, _ in made]
    own.close()


@pytest.fixture
def stopped():
    """What a master sets that has joined all processes."""
    stop = threading.Event()
    stop.set()
    return stop


@pytest.mark.parametrize(("watch_logs", "ends"), [(WATCH_LOGS, False), (log_pipes.watch_logs, True)], ids=SIDES)
def test_processes_that_have_ended_are_not_waited_for(tmp_path, pipes, watch_logs, ends):
    stop = threading.Event()
    watcher = threading.Thread(target=watch_logs, args=[str(tmp_path / "log"), pipes, stop])
    watcher.start()
    try:
        watcher.join(LIMIT if ends else 1.5)

        assert watcher.is_alive() is not ends
    finally:
        stop.set()
        watcher.join(LIMIT)


@pytest.mark.parametrize(
    ("watch_logs", "written"), [(WATCH_LOGS, ""), (log_pipes.watch_logs, "first\nlast\n")], ids=SIDES
)
def test_what_processes_said_last_is_written(tmp_path, pipes, stopped, watch_logs, written):
    watch_logs(str(tmp_path / "log"), pipes, stopped)

    assert (tmp_path / "log").read_text() == written


@pytest.mark.timeout(LIMIT, func_only=True)
def test_a_pipe_that_somebody_else_keeps_open_is_not_waited_for(tmp_path, pipes, stopped):
    heard, _kept = Pipe(duplex=False)

    log_pipes.watch_logs(str(tmp_path / "log"), [*pipes, heard], stopped)

    assert not heard.poll()


def test_what_cannot_be_written_is_taken_all_the_same(monkeypatch, pipes, stopped):
    monkeypatch.setattr(sys, "stderr", Full())

    log_pipes.watch_logs(None, pipes, stopped)

    with pytest.raises(EOFError):
        pipes[-1].recv_bytes()


# metrics/room.py


def test_the_clients_files_have_no_room_of_their_own(tmp_path):
    MmapedDict(str(tmp_path / "counter.db")).close()

    made = (tmp_path / "counter.db").stat()

    assert made.st_blocks * 512 < made.st_size


# metrics/threads.py


def test_a_thread_that_dies_at_once_is_waited_for_for_ever():
    class Dies(threading.Thread):
        def _bootstrap(self):
            pass

    starting = threading.Thread(target=Dies(daemon=True).start, daemon=True)
    starting.start()
    began = time.monotonic()

    starting.join(1)

    assert time.monotonic() - began >= 1
    assert starting.is_alive()
