"""A real HTTP server that keeps the requests that it gets, and answers as a test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import NamedTuple

Answer = Callable[["Handler"], None]


class ReceivedRequest(NamedTuple):
    """A request as it was received."""

    path: str
    headers: dict[str, str]
    body: bytes


class Handler(BaseHTTPRequestHandler):
    """Keeps a request, then answers."""

    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append(ReceivedRequest(self.path, headers, body))
        with suppress(OSError):
            self.server.answer(self)

    do_GET = do_POST  # noqa: N815, the name is the library's

    def log_message(self, *_arguments: object) -> None:
        pass


class Receiver(ThreadingHTTPServer):
    """The server; *answer* may be changed at any time, and *ended* is set when the test ends."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[ReceivedRequest] = []
        self.answer: Answer = answer_with(200)
        self.ended = Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


def answer_with(status: int, **headers: str) -> Answer:
    """Answer with a status and headers, and without a body."""

    def answer(handler: Handler) -> None:
        handler.send_response(status)
        for name, value in ({"Content-Length": "0"} | headers).items():
            handler.send_header(name, value)
        handler.end_headers()

    return answer


def answer_never(handler: Handler) -> None:
    """Keep the connection open without an answer."""
    handler.server.ended.wait()


def answer_byte_by_byte(handler: Handler) -> None:
    """Send a header that never ends, faster than any timeout between two bytes."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
    while not handler.server.ended.wait(0.05):
        handler.wfile.write(b"x")


@contextmanager
def run_receiver() -> Iterator[Receiver]:
    """Run the server until the end of the block."""
    with Receiver() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
            thread.join()
