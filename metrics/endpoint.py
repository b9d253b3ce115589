"""The metrics endpoint: of this process, or of all processes of a worker.

A worker's endpoint is a process of its own, `python -m metrics.endpoint`. The worker's processes keep their values in
files (prometheus_client's multiprocess mode), and the endpoint reads them all: it serves until the last process has
drained, and keeps the counts of a killed process. Each worker has its own folder, with its master's id in the name.
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
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler

import structlog
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from metrics import logs
from metrics.threads import STALLED_AFTER_SECONDS, THREAD_START_SECONDS, CriticalThread, find_stalled

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

MULTIPROC_DIR_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Variable that the client reads once, at its import: a later change would lose counts."""
READY_SUFFIX = ".ready"
"""Suffix of the file, named by process id, that a process writes when it takes messages.

It holds the time of its last activity by the monotonic clock, which all processes of a machine share.
"""
OLD_READYZ_PATH = "/ready"
READY_RENAMED_ANSWER = "ready; /ready is called /readyz now, and is removed with the next release"
WAITS_FOR_SERVERS = "waiting for servers; the log names them"
RESTART_PAUSE_SECONDS = 5.0
"""Seconds before an endpoint that ended is started again."""
SHUTDOWN_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
PR_SET_PDEATHSIG = 1

log = structlog.get_logger(__name__)


class PortTaken(Exception):
    """The endpoint cannot listen at an address; the message has the address and the reason."""


class MetricsEndpoint(ThreadingWSGIServer):
    """Serves `/metrics`, `/livez` and `/readyz`, each request in a thread of its own.

    `/metrics` collects *registry*. `/livez` answers 503 if *find_stalled_reason* returns a reason, and `/readyz` if
    *find_unready_reason* does; neither asks a server. An endpoint that is not *is_open* yet, because its process waits
    for servers, is alive, not ready, and serves no metrics: Prometheus counts its target as down.
    """

    def __init__(
        self,
        listening: socket.socket,
        registry: CollectorRegistry,
        *,
        find_unready_reason: Callable[[], str | None] = lambda: None,
        find_stalled_reason: Callable[[], str | None] = find_stalled,
        is_open: bool = True,
    ) -> None:
        super().__init__(listening.getsockname()[:2], _RequestHandler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.server_name, self.server_port = listening.getsockname()[:2]
        self.setup_environ()
        self.set_app(self._handle_request)
        self._metrics = make_wsgi_app(registry)
        self._unready, self._stalled = find_unready_reason, find_stalled_reason
        self.is_open = is_open

    @property
    def url(self) -> str:
        """Address of the metrics."""
        host = f"[{self.server_name}]" if ":" in self.server_name else self.server_name
        return f"http://{host}:{self.server_port}/metrics"

    def start(self) -> None:
        """Serve in a thread of its own until the process ends."""
        EndpointThread(self).start()

    def handle_error(self, request: object, client_address: tuple[str, int]) -> None:  # noqa: ARG002, the library's
        """Log one line about a request whose client disconnected."""
        error = sys.exception()
        log.info("scrape aborted", client=client_address[0], error=f"{type(error).__name__}: {error}")

    def _handle_request(self, asked: WSGIEnvironment, respond: StartResponse) -> Iterable[bytes]:
        path, closed = asked["PATH_INFO"], None if self.is_open else WAITS_FOR_SERVERS
        if path == "/livez":
            return _answer_health(respond, self._stalled(), "alive")
        if path in {"/readyz", OLD_READYZ_PATH}:
            return _answer_health(
                respond, closed or self._unready(), "ready" if path == "/readyz" else READY_RENAMED_ANSWER
            )
        if path != "/metrics":
            return _answer_text(respond, "404 Not Found", "not found: use /metrics, /livez or /readyz")
        if closed is not None:
            return _answer_health(respond, closed, "")
        try:
            answer: Iterable[bytes] = self._metrics(asked, respond)
        except Exception:
            log.exception("scrape failed", client=asked["REMOTE_ADDR"])
            return _answer_text(respond, "500 Internal Server Error", "the metrics cannot be collected: see the log")
        return answer


def _answer_health(respond: StartResponse, why_not: str | None, fine: str) -> list[bytes]:
    """Answer 200, or 503 with the reason."""
    if why_not is None:
        return _answer_text(respond, "200 OK", fine)
    return _answer_text(respond, "503 Service Unavailable", why_not)


def _answer_text(respond: StartResponse, status: str, text: str) -> list[bytes]:
    # Each answer has a list of its own, because wsgiref adds headers to it.
    respond(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{text}\n".encode()]


class EndpointThread(CriticalThread):
    """Serves an endpoint beside the main work of its process."""

    def __init__(self, endpoint: MetricsEndpoint) -> None:
        super().__init__("metrics")
        self._endpoint = endpoint

    def run_until_stopped(self) -> None:
        """Serve until the process ends."""
        self._endpoint.serve_forever()
        self.stopped.set()


class _RequestHandler(WSGIRequestHandler):
    timeout = 10
    """Seconds to wait for a client that connects and sends nothing."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002, the library's name
        """Log nothing: a line per scrape is useless."""

    def get_stderr(self) -> StringIO:
        """Keep the library's tracebacks out of standard error, which has our log lines."""
        return StringIO()


def open_listening_socket(host: str, port: int, what: str = "metrics") -> socket.socket:
    """Listen at an address; raise `PortTaken` if that fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=64)
    except OSError as error:
        # The library's own text repeats the address. An unresolvable name lacks an errno of the system.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise PortTaken(f"cannot serve {what} at {host}:{port}: {reason}") from None


class WorkerMetricsCollector(Collector):
    """Values of all processes together; gauges of ended processes are left out."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> list[Family]:
        """Read the files; a file that a process is creating, or died while creating, is empty."""
        files = [file for file in self._folder.glob("*_*.db") if file.stat().st_size > 0]
        over = [file for file in self._folder.glob("gauge*.db") if _is_dead(file.stem.rpartition("_")[2])]
        return list(MultiProcessCollector.merge(map(str, {*files} - {*over})))  # type: ignore[no-untyped-call]


def _is_dead(process: str) -> bool:
    return process.isdigit() and not Path("/proc", process).exists()


def why_not_ready(folder: Path) -> str | None:
    """Return why this worker is not ready; None if one of its processes takes messages."""
    if any(file.stem.isdigit() and not _is_dead(file.stem) for file in folder.glob(f"*{READY_SUFFIX}")):
        return None
    return "no process of this worker takes messages"


def find_stalled_process(folder: Path) -> str | None:
    """Return which process of this worker has stalled; None if none has or none is ready."""
    for file in folder.glob(f"*{READY_SUFFIX}"):
        with suppress(OSError, ValueError):
            silent_for = time.monotonic() - float(file.read_text())
            if not _is_dead(file.stem) and silent_for > STALLED_AFTER_SECONDS:
                return f"process {file.stem} of this worker has not responded for {silent_for:.0f} s"
    return None


def create_metrics_folder() -> Path:
    """Create the folder for the metrics of this process, its successor by exec, and its forks.

    Folders of workers that ended without cleanup are removed. In a restarted container, such a worker may have had the
    id of this process.
    """
    prefix, own = f"forgekeeper-worker-{socket.gethostname()}-", str(os.getpid())
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*-*"):
        if (process := folder.name.removeprefix(prefix).partition("-")[0]) == own or _is_dead(process):
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{own}-"))


class EndpointWatch(CriticalThread):
    """Keeps the endpoint running as a child that ends with this process."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__("endpoint")
        self._folder = os.environ[MULTIPROC_DIR_VARIABLE]
        self._command = [sys.executable, "-P", "-m", "metrics.endpoint", host, str(port), self._folder]
        self._endpoint: subprocess.Popen[bytes] | None = None
        self._has_started = threading.Event()
        atexit.register(self._stop_endpoint)

    def start(self) -> None:
        """Start with signals blocked, as Dramatiq installs its handlers in the main thread later.

        Returns when the endpoint is a process of its own, or after `THREAD_START_SECONDS`. `Popen` waits for that on a
        pipe. A worker process that Dramatiq forked at this moment would keep that pipe open as long as it lives: the
        endpoint would serve, but nothing would restart it after its end.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SHUTDOWN_SIGNALS)
        super().start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._has_started.wait(THREAD_START_SECONDS)

    def find_stalled_process(self) -> str | None:
        """Return which process of this worker has stalled, as its page `/livez` does."""
        return find_stalled_process(Path(self._folder))

    def run_until_stopped(self) -> None:
        """Start the endpoint again whenever it ends."""
        while not self.stopped.is_set():
            self.take_turn(self._run_endpoint)
            self.stopped.wait(RESTART_PAUSE_SECONDS)

    def _run_endpoint(self) -> None:
        try:
            self._endpoint = subprocess.Popen(
                [*self._command, str(os.getpid())], stdin=subprocess.DEVNULL, start_new_session=True
            )
        except (OSError, MemoryError) as error:
            # The worker continues without metrics: its task is to delete.
            log.warning("metrics endpoint not started", error=str(error))
            return
        self._has_started.set()
        status = self._endpoint.wait()
        if not self.stopped.is_set():
            log.error("metrics endpoint ended", status=status)

    def _stop_endpoint(self) -> None:
        """Remove the folder after the endpoint's end: an empty page would show falling counters."""
        self.stopped.set()
        if self._endpoint is not None:
            self._endpoint.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


def main(host: str, port: str, folder: str, master: str) -> int:
    """Serve the metrics as long as the thread of the master that started this process lives."""
    logs.configure()
    for number in SHUTDOWN_SIGNALS:
        # These signals are for the workers; the endpoint serves until they have drained.
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    registry = CollectorRegistry()
    registry.register(WorkerMetricsCollector(Path(folder)))
    try:
        counted_in = Path(folder)
        endpoint = MetricsEndpoint(
            open_listening_socket(host, int(port)),
            registry,
            find_unready_reason=lambda: why_not_ready(counted_in),
            find_stalled_reason=lambda: find_stalled_process(counted_in),
        )
    except PortTaken as error:
        log.warning("metrics endpoint not started", error=str(error))
        return 1
    if os.getppid() == int(master):
        endpoint.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
