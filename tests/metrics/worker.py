"""A worker with a page, as a process."""

import socket
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from forgekeeper.platform.database import now
from models import UserStatus
from tests.harness.programs import READY, Program

ROOT = Path(__file__).parents[2]
NAME = "user_status_cleanup"
PATIENT = {"DATABASE_LOCK_TIMEOUT": 60, "DATABASE_STATEMENT_TIMEOUT": 60}
"""Settings that let a run wait for a lock for as long as a test wants it held."""


class WorkerWithPage(Program):
    """`forgekeeper worker` with a page."""

    def __init__(self, folder, port, processes, settings):
        self._port = port
        self._processes = processes
        self.url = f"http://127.0.0.1:{port}/metrics"
        self.temporary = folder
        usual = {"METRICS_PORT_WORKER": port, "RETRY_AFTER": 60, "REPOSITORIES_ROOT": folder / "gone"}
        words = ("-m", "forgekeeper.cli", "worker", "--processes", processes, "--threads", 2)
        super().__init__(folder / "worker.log", *words, **(usual | settings))

    def environment(self):
        return super().environment() | {"TMPDIR": str(self.temporary)}

    @property
    def folders(self):
        return list(self.temporary.glob("forgekeeper-worker-*"))

    def is_up(self):
        """Say whether all its processes have told their master so; one that has not hangs once its master is killed."""
        return self.text().count(READY) == self._processes

    @property
    def children(self):
        """The ids of the worker processes: those that listen to Redis, not the page."""
        return [pid for pid in super().children if not serves(pid)]

    @property
    def endpoint(self):
        """The id of the process that serves the metrics."""
        (found,) = filter(serves, super().children)
        return found

    def listens(self):
        """Say whether its page can be connected to."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._port)):
            return True
        return False


def serves(pid):
    with suppress(OSError):  # it has ended
        return b"metrics.endpoint" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return True


def due(count):
    for number in range(count):
        UserStatus.create(user_id=number, clear_status_at=now() - timedelta(minutes=1))
