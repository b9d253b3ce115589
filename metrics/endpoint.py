"""The metrics endpoint, on a socket that was bound before: a busy port ends the start, not the endpoint."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterable
from io import StringIO
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler

import structlog
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from metrics.threads import Vital

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

log = structlog.get_logger(__name__)


class PortTaken(Exception):
    """The address cannot be listened at; the message says which, and why."""


class Endpoint(ThreadingWSGIServer):
    """Serves what *registry* collects, each scrape in a thread of its own.

    At `/ready` it answers 200, or 503 while *unready* names a reason: what container platforms ask.
    """

    def __init__(
        self, listening: socket.socket, registry: CollectorRegistry, *, unready: Callable[[], str | None] = lambda: None
    ) -> None:
        super().__init__(listening.getsockname()[:2], _Request, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.server_name, self.server_port = listening.getsockname()[:2]
        self.setup_environ()
        self.set_app(self._answer)
        self._metrics = make_wsgi_app(registry)
        self._unready = unready

    @property
    def url(self) -> str:
        """Where the metrics are."""
        host = f"[{self.server_name}]" if ":" in self.server_name else self.server_name
        return f"http://{host}:{self.server_port}/metrics"

    def start(self) -> None:
        """Serve from a thread of its own, until the process ends."""
        Server(self).start()

    def handle_error(self, request: object, client_address: tuple[str, int]) -> None:  # noqa: ARG002, the library's
        """Log in a line what became of a request whose client went away."""
        error = sys.exception()
        log.info("scrape broken off", client=client_address[0], error=f"{type(error).__name__}: {error}")

    def _answer(self, asked: WSGIEnvironment, respond: StartResponse) -> Iterable[bytes]:
        if asked["PATH_INFO"] == "/ready":
            why_not = self._unready()
            respond("200 OK" if why_not is None else "503 Service Unavailable", [("Content-Type", "text/plain")])
            return [f"{why_not or 'ready'}\n".encode()]
        try:
            answer: Iterable[bytes] = self._metrics(asked, respond)
        except Exception:
            log.exception("scrape failed", client=asked["REMOTE_ADDR"])
            respond("500 Internal Server Error", [("Content-Type", "text/plain")])
            return [b"the metrics cannot be collected; the log says why\n"]
        return answer


class Server(Vital):
    """Serves an endpoint beside what its process is there for."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__("metrics")
        self._endpoint = endpoint

    def work(self) -> None:
        """Serve until the process ends."""
        self._endpoint.serve_forever()
        self.stopped.set()


class _Request(WSGIRequestHandler):
    timeout = 10
    """A client that connects and sends nothing is not waited for longer."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002, the library's name
        """Log nothing: a line for each scrape is of no use to anybody."""

    def get_stderr(self) -> StringIO:
        """Keep traces of the library's out of standard error, which has our lines."""
        return StringIO()


def listen(host: str, port: int) -> socket.socket:
    """Listen at an address; raise `PortTaken` when that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=64)
    except OSError as error:
        # The library's own text repeats the address; that of a name which leads nowhere has no number of the system's.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise PortTaken(f"cannot serve metrics at {host}:{port}: {reason}") from None
