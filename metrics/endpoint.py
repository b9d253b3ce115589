"""The metrics endpoint, on a socket that was bound before: a busy port ends the start, not the endpoint."""

from __future__ import annotations

import os
import socket
import socketserver
import sys
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import ServerHandler, WSGIRequestHandler, WSGIServer

import structlog
from prometheus_client import CollectorRegistry, make_wsgi_app

from metrics.threads import Vital

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

LONGEST_LINE = 65_536
"""Bytes of a request's first line."""
PAUSE = 1.0
"""Seconds after which an endpoint that has failed is served again."""

log = structlog.get_logger(__name__)


class PortTaken(Exception):
    """The address cannot be listened at; the message says which, and why."""


class Endpoint(socketserver.ThreadingMixIn, WSGIServer):
    """Serves what *registry* collects, each scrape in a thread of its own; *turn* is called every fifth of a second.

    At `/ready` it answers 200, or 503 while *unready* names a reason: what container platforms ask.
    """

    daemon_threads = True

    def __init__(
        self,
        listening: socket.socket,
        registry: CollectorRegistry,
        turn: Callable[[], None] = lambda: None,
        *,
        unready: Callable[[], str | None] = lambda: None,
    ) -> None:
        super().__init__(listening.getsockname()[:2], _Request, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.server_name, self.server_port = listening.getsockname()[:2]
        self.setup_environ()
        self.set_app(_beside_readiness(make_wsgi_app(registry), unready))
        self._turn = turn

    @property
    def url(self) -> str:
        """Where the metrics are."""
        host = f"[{self.server_name}]" if ":" in self.server_name else self.server_name
        return f"http://{host}:{self.server_port}/metrics"

    def service_actions(self) -> None:
        """Do what else there is to do, between requests."""
        super().service_actions()
        self._turn()

    def handle_error(self, request: object, client_address: tuple[str, int]) -> None:  # noqa: ARG002, the library's
        """Say in a line what became of a request."""
        _broken_off(client_address[0], sys.exception())

    def start(self) -> None:
        """Serve from a thread of its own, until the process ends."""
        Server(self).start()

    def serve(self) -> None:
        """Serve until shut down."""
        self.serve_forever(poll_interval=0.2)


class Server(Vital):
    """Serves an endpoint beside what its process is there for."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__("metrics")
        self._endpoint = endpoint

    def work(self) -> None:
        """Serve until the process ends; what ends that is one turn's failure."""
        while not self.take_turn(self._endpoint.serve):
            self.stopped.wait(PAUSE)
        self.stopped.set()


def _beside_readiness(scrapes: WSGIApplication, unready: Callable[[], str | None]) -> WSGIApplication:
    def answer(asked: WSGIEnvironment, respond: StartResponse) -> Iterable[bytes]:
        if asked["PATH_INFO"] != "/ready":
            return scrapes(asked, respond)
        why_not = unready()
        respond("200 OK" if why_not is None else "503 Service Unavailable", [("Content-Type", "text/plain")])
        return [f"{why_not or 'ready'}\n".encode()]

    return answer


class _Request(WSGIRequestHandler):
    timeout = 10
    """Who connects and says nothing is not waited for longer."""

    def handle(self) -> None:
        """Handle one request, as the library does."""
        self.raw_requestline = self.rfile.readline(LONGEST_LINE + 1)
        if len(self.raw_requestline) > LONGEST_LINE:
            self.requestline = self.request_version = self.command = ""
            self.send_error(HTTPStatus.REQUEST_URI_TOO_LONG)
        elif self.parse_request():
            assert isinstance(self.server, Endpoint)
            answer = _Answer(self.rfile, self.wfile, self.get_stderr(), self.get_environ(), multithread=True)  # type: ignore[arg-type]
            answer.request_handler = self  # type: ignore[attr-defined]
            answer.run(self.server.get_app())  # type: ignore[arg-type]

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002, the library's name
        """Say nothing: a line for each scrape tells nobody anything."""


class _Answer(ServerHandler):
    def log_exception(self, exc_info: Any) -> None:
        """Say in a line what became of the request, not in a trace on standard error."""
        _broken_off(self.base_env["REMOTE_ADDR"], exc_info[1])


def _broken_off(client: str, error: BaseException | None) -> None:
    if isinstance(error, OSError):
        # It went away, says nothing, or takes nothing: its own affair.
        log.info("scrape broken off", client=client, error=f"{type(error).__name__}: {error}")
    else:
        log.error("scrape failed", client=client, exc_info=error)


def listen(host: str, port: int) -> socket.socket:
    """Listen at an address; raise `PortTaken` when that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=64)
    except OSError as error:
        # The library's own text repeats the address; that of a name which leads nowhere has no number of the system's.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise PortTaken(f"cannot serve metrics at {host}:{port}: {reason}") from None
