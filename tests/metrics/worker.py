"""A worker with a page, as a process."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from forgekeeper.database import now
from forgekeeper.settings import PREFIX
from metrics import multiprocess
from models import UserStatus

ROOT = Path(__file__).parents[2]
NAME = "user_status_cleanup"
LIMIT = 60.0
PATIENT = {"DATABASE_LOCK_TIMEOUT": 60, "DATABASE_STATEMENT_TIMEOUT": 60}
"""Settings that let a run wait for a lock for as long as a test wants it held."""


class WorkerWithPage:
    """`forgekeeper worker` with a page."""

    def __init__(self, folder, port, processes, settings):
        self._port = port
        self._processes = processes
        self.url = f"http://127.0.0.1:{port}/metrics"
        self.temporary = folder
        self.log = folder / "worker.log"
        usual = {"METRICS_PORT_WORKER": port, "RETRY_AFTER": 60, "DEAD_AFTER": 3, "REPOSITORIES_ROOT": folder / "gone"}
        with self.log.open("ab") as output:
            self.master = subprocess.Popen(
                [sys.executable, "-m", "forgekeeper.cli", "worker", "--processes", str(processes), "--threads", "2"],
                env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
                | {PREFIX + name: str(value) for name, value in (usual | settings).items()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def folders(self):
        return list(self.temporary.glob(f"{multiprocess.PREFIX}*"))

    def is_up(self):
        """Say whether all its processes have told their master so; one that has not hangs once its master is killed."""
        return self.log.read_text().count("Worker process is ready for action.") == self._processes

    @property
    def children(self):
        """The ids of the worker processes: those that listen to Redis, not the page."""
        found = []
        for pid in Path(f"/proc/{self.master.pid}/task/{self.master.pid}/children").read_text().split():
            with suppress(OSError):  # it has ended
                if b"metrics.multiprocess" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
        return found

    @property
    def page(self):
        """The id of the process that serves the page."""
        tasks = Path(f"/proc/{self.master.pid}/task").glob("*/children")
        children = [int(pid) for task in tasks for pid in task.read_text().split()]
        (page,) = [pid for pid in children if b"metrics.multiprocess" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return page

    def listens(self):
        """Say whether its page can be connected to."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._port)):
            return True
        return False

    def clean_up(self):
        if self.master.poll() is None:
            self.master.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.master.wait(LIMIT)
        with suppress(ProcessLookupError):
            os.killpg(self.master.pid, signal.SIGKILL)
        self.master.wait()


def due(count):
    for number in range(count):
        UserStatus.create(user_id=number, clear_status_at=now() - timedelta(minutes=1))
