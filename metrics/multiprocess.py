"""`python -m metrics.multiprocess`: the metrics endpoint of all processes of a worker, a process of its own.

The processes keep what they count in files; this one reads them all.  So the endpoint is there
before the first of them and through the drain of the last, and what a killed one has counted
is not lost.  An endpoint that is killed itself is started anew by the master.  Each start has a
folder of its own, and whoever works with it holds its lock: a folder that nobody holds was left
behind, and is removed by the next who starts.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from metrics import logs
from metrics.catalogue import stored
from metrics.catalogue.metric import Metric
from metrics.endpoint import Endpoint, PortTaken
from metrics.instruments import Instruments
from metrics.room import reserve
from metrics.threads import Vital

PREFIX = "forgekeeper-worker-"
GRAVE = "dead"
"""Instead of a process's id, in the names of the files that hold what dead ones have counted."""
FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The client looks at it once, when it is first imported: setting it later would lose every count."""
PID = "page.pid"
"""The file, beside what is counted, with the id of the process that is the endpoint."""
PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before an endpoint that has ended is started again: each time twice as many, unless it has lived as long."""
SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}

log = structlog.get_logger(__name__)


READY = ".ready"
"""How the name of the file ends, after a process's id, by which that process says that it takes messages."""


class MasterEnded(Exception):
    """The process whose workers are shown has ended."""


class Multiprocess(Collector):
    """What all processes together have counted, and zeros for what none of them has.

    Nothing at all where the folder is gone: zeros would look like a worker that has nothing to tell.
    """

    def __init__(self, folder: Path, metrics: Mapping[str, Metric]) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._zeros = list(Instruments("worker").know(metrics).zero().registry.collect())

    def describe(self) -> list[Family]:
        """Name nothing: to be asked what there is would be a scrape."""
        return []

    def collect(self) -> list[Family]:
        """Read the files."""
        if not self._folder.is_dir():
            return []
        with self._lock:
            files = filter(_has_begun, self._folder.glob("*.db"))
            merged = MultiProcessCollector.merge(map(str, files), accumulate=True)  # type: ignore[no-untyped-call]
            found = {family.name: family for family in merged}
        return [_with_zeros(zero, found.get(zero.name)) for zero in self._zeros]

    def bury(self) -> None:
        """Add the files of dead processes up into one for each type: an endpoint must not get slower with every death.

        What a dead process was at is over; what it has counted stays.  On a full disk all stays as it is.
        """
        dead = [file for file in self._folder.glob("*_*.db") if _has_no_owner(file)]
        if not dead:
            return
        with self._lock:
            for kind in ("counter", "histogram", "gauge"):
                buried = [file for file in dead if file.name.startswith(kind)]
                with suppress(OSError):
                    if kind != "gauge":
                        _add_up(self._folder / f"{kind}_{GRAVE}.db", [file for file in buried if _has_begun(file)])
                    for file in buried:
                        file.unlink(missing_ok=True)


def _with_zeros(zero: Family, counted: Family | None) -> Family:
    """Return what was counted, and a zero for every series of which nothing was."""
    family = Family(zero.name, zero.documentation, zero.type)
    family.samples = list(counted.samples) if counted else []
    known = {(sample.name, *sorted(sample.labels.items())) for sample in family.samples}
    family.samples += [s for s in zero.samples if (s.name, *sorted(s.labels.items())) not in known]
    return family


def _has_begun(file: Path) -> bool:
    """Say whether the file can be read: one that a process is just making, or died making, is empty."""
    return file.stat().st_size > 0


def _has_no_owner(file: Path) -> bool:
    owner = file.stem.rpartition("_")[2]
    return owner.isdigit() and _is_dead(int(owner))


def _is_dead(owner: int) -> bool:
    try:
        os.kill(owner, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def unready(folder: Path) -> str | None:
    """Say why this worker is not ready; None where one of its processes takes messages."""
    if any(file.stem.isdigit() and not _is_dead(int(file.stem)) for file in folder.glob(f"*{READY}")):
        return None
    return "no process of this worker takes messages"


def _add_up(grave: Path, dead: list[Path]) -> None:
    """Replace the file *grave* by the sum of itself and the *dead*."""
    if not dead:
        return
    sums: dict[str, float] = defaultdict(float)
    for file in [grave, *dead] if grave.exists() else dead:
        for key, value, _timestamp, _position in MmapedDict.read_all_values_from_file(str(file)):  # type: ignore[no-untyped-call]
            sums[key] += value
    new = grave.with_suffix(".new")
    new.unlink(missing_ok=True)
    reserve(new)
    written = MmapedDict(str(new))  # type: ignore[no-untyped-call]
    for key, value in sums.items():
        written.write_value(key, value, 0.0)  # type: ignore[no-untyped-call]
    written.close()  # type: ignore[no-untyped-call]
    new.rename(grave)


def begin(listening: socket.socket, environment: Mapping[str, str], metrics: Mapping[str, Metric]) -> Path:
    """Start the endpoint of the processes that this one will start; return the folder they have to count in.

    This process may replace its program: it is known by its id.  The lock goes with it, and
    to every process that it forks.
    """
    remove_abandoned()
    folder, lock = locked_folder()
    os.set_inheritable(lock, True)
    stored.write(folder, metrics)
    start(listening, folder, environment)
    return folder


def start(listening: socket.socket, folder: Path, environment: Mapping[str, str] | None = None) -> int:
    """Start the endpoint as a child of this process; return its id."""
    endpoint = subprocess.Popen(
        [sys.executable, "-P", "-m", "metrics.multiprocess", str(listening.fileno()), str(folder), str(os.getpid())],
        pass_fds=[listening.fileno()],
        env=environment,
        stdin=subprocess.DEVNULL,
        # Signals are for those who work; it ends after them.
        start_new_session=True,
    )
    with suppress(OSError):  # without the folder there is no endpoint; that it cannot be watched then is the least
        (folder / PID).write_text(str(endpoint.pid))
    # It is waited for by its id, perhaps by another program in this process.
    endpoint.returncode = 0
    return endpoint.pid


class Watch(Vital):
    """Starts the endpoint again, on what *listen* returns, whenever it has ended.

    It is of the process that has started the endpoint, and ends with it.
    """

    def __init__(self, listen: Callable[[], socket.socket]) -> None:
        super().__init__("page")
        self._listen = listen
        self._folder = Path(os.environ[FOLDER])
        self._endpoint = int((self._folder / PID).read_text())
        self._began = time.monotonic()
        self._pause = PAUSE / 2

    def start(self) -> None:
        """Start, deaf to the signals that are for those who work: Dramatiq has its handlers for them only later."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        super().start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def work(self) -> None:
        """Wait for the endpoint's end and start another, for as long as the process lives."""
        while not self.stopped.is_set():
            self.take_turn(self._turn)

    def _turn(self) -> None:
        with suppress(ChildProcessError):  # known to have ended, and no other could be started
            _pid, status = os.waitpid(self._endpoint, 0)
            log.error("metrics page has ended", status=os.waitstatus_to_exitcode(status))
            long = time.monotonic() - self._began > LONGEST_PAUSE
            self._pause = PAUSE if long else min(2 * self._pause, LONGEST_PAUSE)
        self.stopped.wait(self._pause)
        self._began = time.monotonic()
        try:
            with self._listen() as listening:
                self._endpoint = start(listening, self._folder)
        except (PortTaken, OSError) as error:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            log.warning("metrics page not started", error=str(error))
        else:
            log.info("metrics page started anew")


def serve(listening: socket.socket, folder: Path, master: int) -> None:
    """Serve the metrics until the master has ended; remove the folder when its last worker has."""
    registry = CollectorRegistry()
    merged = Multiprocess(folder, stored.read(folder))
    registry.register(merged)

    def turn() -> None:
        merged.bury()
        if os.getppid() != master:
            raise MasterEnded

    with suppress(MasterEnded), Endpoint(listening, registry, turn, unready=lambda: unready(folder)) as endpoint:
        endpoint.serve()
    # The port is free for the next; orphans that still drain go on counting, and need their folder.
    with suppress(FileNotFoundError):
        os.close(_lock(folder))
    shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path, options: int = 0) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | options)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def locked_folder() -> tuple[Path, int]:
    """Make a folder for a worker; return it, and the descriptor of its lock."""
    # Another worker that starts just now removes what has the name and no lock.
    new = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))
    lock = _lock(new)
    return new.rename(new.with_name(new.name.removeprefix("."))), lock


def remove_abandoned() -> None:
    """Remove the folders of workers that have died with their endpoints."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_uid == os.getuid():
                lock = _lock(folder, fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def main(arguments: list[str]) -> None:
    """Serve as *arguments* say: the listening socket's number, the folder, the master's id."""
    logs.configure()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # A supervisor tells everybody; the endpoint stays through the drain.
        signal.signal(number, signal.SIG_IGN)
    descriptor, folder, master = arguments
    serve(socket.socket(fileno=int(descriptor)), Path(folder), int(master))


if __name__ == "__main__":
    main(sys.argv[1:])
