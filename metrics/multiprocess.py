"""`python -m metrics.multiprocess`: the metrics endpoint of all processes of a worker, a process of its own.

The processes keep what they count in files (prometheus_client's multiprocess mode); this one reads them all.  So the
endpoint is there through the drain of the last, and what a killed one has counted is not lost.  Each worker has a
folder of its own, and each process that works with it holds its lock: a folder that nobody holds is removed by the
next worker that starts.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from metrics import logs
from metrics.endpoint import Endpoint, PortTaken, listen
from metrics.room import reserve
from metrics.threads import START, Vital

PREFIX = "forgekeeper-worker-"
DEAD = "dead"
"""Instead of a process's id, in the names of the files that hold what dead ones have counted."""
FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The client looks at it once, when it is first imported: setting it later would lose every count."""
READY = ".ready"
"""How the name of the file ends, after a process's id, by which that process says that it takes messages."""
PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before an endpoint that has ended is started again, each time twice as many."""
SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
PR_SET_PDEATHSIG = 1

log = structlog.get_logger(__name__)


class Multiprocess(Collector):
    """What all processes together have counted.  What dead ones have counted is added up into one file of each type."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    def describe(self) -> list[Family]:
        """Name nothing: to be asked what there is would be a scrape."""
        return []

    def collect(self) -> list[Family]:
        """Read the files."""
        with self._lock:
            self._add_up()
            files = [str(file) for file in self._folder.glob("*.db") if _has_begun(file)]
            return list(MultiProcessCollector.merge(files))  # type: ignore[no-untyped-call]

    def _add_up(self) -> None:
        """Add up the files of dead processes: a scrape must not get slower with every death, nor the disk fuller.

        The gauges of dead processes are over.  On a full disk all stays as it is.
        """
        dead = [file for file in self._folder.glob("*_*.db") if _is_dead(file.stem.rpartition("_")[2])]
        for kind in ("counter", "histogram", "gauge"):
            files = [file for file in dead if file.name.startswith(kind)]
            with suppress(OSError):
                if files and kind != "gauge":
                    _add_to(self._folder / f"{kind}_{DEAD}.db", [file for file in files if _has_begun(file)])
                for file in files:
                    file.unlink(missing_ok=True)


def _has_begun(file: Path) -> bool:
    """Say whether the file can be read: one that a process is just making, or died making, is empty."""
    return file.stat().st_size > 0


def _is_dead(owner: str) -> bool:
    """Say whether *owner* is the id of a process that has ended."""
    try:
        os.kill(int(owner), 0)
    except ProcessLookupError:
        return True
    except (ValueError, PermissionError):
        return False
    return False


def _add_to(total: Path, files: list[Path]) -> None:
    """Replace the file *total* by the sum of itself and the *files*."""
    sums: dict[str, float] = defaultdict(float)
    for file in [total, *files] if total.exists() else files:
        for key, value, _timestamp, _position in MmapedDict.read_all_values_from_file(str(file)):  # type: ignore[no-untyped-call]
            sums[key] += value
    new = total.with_suffix(".new")
    new.unlink(missing_ok=True)
    reserve(new)
    written = MmapedDict(str(new))  # type: ignore[no-untyped-call]
    for key, value in sums.items():
        written.write_value(key, value, 0.0)  # type: ignore[no-untyped-call]
    written.close()  # type: ignore[no-untyped-call]
    new.rename(total)


def unready(folder: Path) -> str | None:
    """Say why this worker is not ready; None where one of its processes takes messages."""
    if any(file.stem.isdigit() and not _is_dead(file.stem) for file in folder.glob(f"*{READY}")):
        return None
    return "no process of this worker takes messages"


def begin() -> Path:
    """Make the folder that this process, which may replace its program, and those that it forks will count in."""
    remove_abandoned()
    folder, lock = locked_folder()
    os.set_inheritable(lock, True)
    return folder


class Watch(Vital):
    """Keeps the endpoint running, as a child of this process that ends with it."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__("endpoint")
        self._folder = os.environ[FOLDER]
        self._command = [sys.executable, "-P", "-m", "metrics.multiprocess", host, str(port), self._folder]
        self._pause = PAUSE
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
            self.stopped.wait(self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)

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


def locked_folder() -> tuple[Path, int]:
    """Make a folder for a worker; return it, and the descriptor of its lock."""
    # Another worker that starts just now removes what has the name and no lock.
    new = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))
    lock = _lock(new)
    return new.rename(new.with_name(new.name.removeprefix("."))), lock


def _lock(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def remove_abandoned() -> None:
    """Remove the folders of workers that have ended without removing them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_uid == os.getuid():
                lock = _lock(folder)
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


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
