"""Metrics endpoints, read as Prometheus reads them, and compared with what was done."""

from __future__ import annotations

import socket
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from http.client import HTTPException

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample as Series

from demo.figures import Figure, Pages

Compared = list[tuple[Figure, float | None]]
"""Figures, and what is shown for each."""


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that are free now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


def scrape(urls: Mapping[str, str]) -> Pages:
    """Read these endpoints; one that does not answer shows nothing."""
    return {name: _read(url) for name, url in urls.items()}


def compare(urls: Mapping[str, str], done: Callable[[Pages], Iterable[Figure]], *, timeout: float) -> Compared:
    """Compare what is shown with what was *done*, until they agree or *timeout* seconds have passed.

    Runs go on meanwhile, and one is counted a moment after its row is closed: so what was done may not have changed
    while the endpoints were read.
    """
    ends = time.monotonic() + timeout
    while True:
        pages = scrape(urls)
        figures = list(done(pages))
        compared = [(figure, figure.shown(pages)) for figure in figures]
        agreed = all(shown == figure.done for figure, shown in compared)
        if (agreed and figures == list(done(pages))) or time.monotonic() > ends:
            return compared
        time.sleep(0.1)


def _read(url: str) -> list[Series]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310, an endpoint of our own
            text = answer.read().decode()
    except (OSError, HTTPException):
        return []
    return [series for family in text_string_to_metric_families(text) for series in family.samples]
