"""What the metrics must show when the sample data was worked off; their endpoints are read as Prometheus reads them."""

from __future__ import annotations

import socket
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from http.client import HTTPException
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample as Series

Pages = Mapping[str, list[Series]]
"""What each process's metrics endpoint shows, by the name of its command."""


class Figure(NamedTuple):
    """What a process must show: the series of *metric* with these labels add up to *done*."""

    page: str
    metric: str
    labels: Mapping[str, str]
    done: float

    def shown(self, pages: Pages) -> float | None:
        """Return what is shown, None when there is no such series."""
        values = [
            series.value
            for series in pages[self.page]
            if series.name == f"forgekeeper_{self.metric}" and self.labels.items() <= series.labels.items()
        ]
        return sum(values) if values else None


def processed(batch: str, record: str, count: int) -> Figure:
    """Return the figure that so many records of a kind were processed."""
    return Figure("worker", "records_processed_total", {"batch": batch, "record": record}, count)


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


def compare(urls: Mapping[str, str], done: Callable[[], Iterable[Figure]], *, timeout: float) -> Compared:
    """Compare what is shown with what was *done*, until they agree or *timeout* seconds have passed."""
    ends = time.monotonic() + timeout
    while True:
        figures, pages = list(done()), scrape(urls)
        compared = [(figure, figure.shown(pages)) for figure in figures]
        if all(shown == figure.done for figure, shown in compared) or time.monotonic() > ends:
            return compared
        time.sleep(0.1)


def _read(url: str) -> list[Series]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310, an endpoint of our own
            text = answer.read().decode()
    except (OSError, HTTPException):
        return []
    return [series for family in text_string_to_metric_families(text) for series in family.samples]
