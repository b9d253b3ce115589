"""Faults of other libraries that we work around: a test that fails says that the library no longer needs it.

Each is named in the docstring of the module that meets it.
"""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from prometheus_client.mmap_dict import MmapedDict

from tests.harness.waiting import wait_until

LIMIT = 60.0
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
