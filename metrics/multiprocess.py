"""`python -m metrics.multiprocess`: the metrics endpoint of all processes of a worker, a process of its own.

The processes keep what they count in files (prometheus_client's multiprocess mode); this one reads them all.  So the
endpoint is there through the drain of the last, and what a killed one has counted is not lost.  Each worker has a
folder of its own, with its master's id in its name.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from metrics import logs
from metrics.endpoint import Endpoint, PortTaken, listen
from metrics.threads import START, Vital

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The client looks at it once, when it is first imported: setting it later would lose every count."""
READY = ".ready"
"""How the name of the file ends, after a process's id, by which that process says that it takes messages."""
PAUSE = 5.0
"""Seconds before an endpoint that has ended is started again."""
SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
PR_SET_PDEATHSIG = 1

log = structlog.get_logger(__name__)


class Multiprocess(Collector):
    """What all processes together have counted, those that have ended too; the gauges of these are over."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> list[Family]:
        """Read the files; one that a process is just making, or died making, is empty."""
        files = [file for file in self._folder.glob("*_*.db") if file.stat().st_size > 0]
        over = [file for file in self._folder.glob("gauge*.db") if _is_dead(file.stem.rpartition("_")[2])]
        return list(MultiProcessCollector.merge(map(str, {*files} - {*over})))  # type: ignore[no-untyped-call]


def _is_dead(process: str) -> bool:
    return process.isdigit() and not Path("/proc", process).exists()


def unready(folder: Path) -> str | None:
    """Say why this worker is not ready; None where one of its processes takes messages."""
    if any(file.stem.isdigit() and not _is_dead(file.stem) for file in folder.glob(f"*{READY}")):
        return None
    return "no process of this worker takes messages"


def begin() -> Path:
    """Make the folder that this process, which may replace its program, and those that it forks will count in.

    The folders of workers that have ended without removing them are removed.
    """
    prefix = f"forgekeeper-worker-{socket.gethostname()}-"
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*-*"):
        if _is_dead(folder.name.removeprefix(prefix).partition("-")[0]):
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-"))


class Watch(Vital):
    """Keeps the endpoint running, as a child of this process that ends with it."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__("endpoint")
        self._folder = os.environ[FOLDER]
        self._command = [sys.executable, "-P", "-m", "metrics.multiprocess", host, str(port), self._folder]
        self._endpoint: subprocess.Popen[bytes] | None = None
        self._made = threading.Event()
        atexit.register(self._end)

    def start(self) -> None:
        """Start, without the signals that are for the main thread: Dramatiq has its handlers for them only later.

        It returns when the endpoint is a process of its own, or after `START`.  `Popen` waits for that on a pipe, and
        a worker process that Dramatiq forked at this moment would hold that pipe open for as long as it lives: the
        endpoint would serve, but when it ended nothing would start it again.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        super().start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._made.wait(START)

    def work(self) -> None:
        """Start the endpoint whenever it has ended."""
        while not self.stopped.is_set():
            self.take_turn(self._run)
            self.stopped.wait(PAUSE)

    def _run(self) -> None:
        self._endpoint = subprocess.Popen(
            [*self._command, str(os.getpid())], stdin=subprocess.DEVNULL, start_new_session=True
        )
        self._made.set()
        status = self._endpoint.wait()
        if not self.stopped.is_set():
            log.error("metrics endpoint has ended", status=status)

    def _end(self) -> None:
        """Remove the folder, and first its page: an empty one would say that counters have fallen."""
        self.stopped.set()
        if self._endpoint is not None:
            self._endpoint.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


def main(host: str, port: str, folder: str, master: str) -> int:
    """Serve the metrics for as long as the master's thread that has started this process lives."""
    logs.configure()
    for number in SIGNALS:
        # They are for those who work; the endpoint stays through the drain.
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    registry = CollectorRegistry()
    registry.register(Multiprocess(Path(folder)))
    try:
        endpoint = Endpoint(listen(host, int(port)), registry, unready=lambda: unready(Path(folder)))
    except PortTaken as error:
        log.warning("metrics endpoint not started", error=str(error))
        return 1
    if os.getppid() == int(master):
        endpoint.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
