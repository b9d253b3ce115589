"""Whoever asks for a page and does it badly: a line about it, and everybody else is served."""

import json
import socket
import struct
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from metrics import endpoint as pages
from metrics.endpoint import Endpoint, listen
from tests.harness.waiting import wait_until

LIMIT = 60.0


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setattr(pages._Request, "timeout", LIMIT)
    running = []

    def start(registry):
        running.append(Endpoint(listen("127.0.0.1", 0), registry))
        running[-1].start()
        return running[-1]

    yield start
    for page in running:
        page.shutdown()
        page.server_close()


@pytest.fixture
def page(serve):
    return serve(CollectorRegistry())


def connect(page):
    return socket.create_connection(("127.0.0.1", page.server_port), LIMIT)


def reset(client):
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def silent(page):
    return connect(page)


def resetting(page):
    client = connect(page)
    client.send(b"GET /me")
    reset(client)


@pytest.mark.parametrize("client", [silent, resetting])
def test_a_client_that_does_it_badly_is_a_line_and_no_trace(page, stream, capfd, client, monkeypatch):
    monkeypatch.setattr(pages._Request, "timeout", 0.5)
    kept = client(page)

    assert wait_until(lambda: stream.getvalue().endswith("\n"), LIMIT)
    line = json.loads(stream.getvalue())
    assert (line["level"], line["message"], line["client"]) == ("info", "scrape broken off", "127.0.0.1")
    assert capfd.readouterr().err == ""
    if kept:
        kept.close()


class Broken(Collector):
    """Metrics that cannot be told."""

    def collect(self):
        raise ArithmeticError("\x1bxxx " + "x " * 1_000_000)


def test_a_page_that_cannot_be_made_is_a_line_with_the_trace(serve, stream, capfd):
    registry = CollectorRegistry()
    registry.register(Broken())
    page = serve(registry)

    with pytest.raises(urllib.error.HTTPError, match="500"):
        urllib.request.urlopen(page.url, timeout=LIMIT)

    line = json.loads(stream.getvalue())
    assert (line["level"], line["message"]) == ("error", "scrape failed")
    assert "ArithmeticError: \\x1bxxx" in line["exception"]
    assert len(stream.getvalue()) < 10_000
    assert capfd.readouterr().err == ""
