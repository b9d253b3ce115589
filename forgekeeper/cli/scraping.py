"""Pages of metrics, read as Prometheus reads them, and held against what was done."""

from __future__ import annotations

import socket
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from http.client import HTTPException
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from forgekeeper.brought import Figure

Pages = Mapping[str, list[Sample]]
"""What each process's page shows, by the name of its command."""

TIMEOUT = 5.0
PAUSE = 0.1


class PageMissing(Exception):
    """A page cannot be read; the message says which, and why."""


class Compared(NamedTuple):
    """A figure, and what was found on its page."""

    figure: Figure
    shown: float | None

    @property
    def agrees(self) -> bool:
        """Say whether the page shows what was done."""
        return self.shown == self.figure.done


def free_ports(count: int) -> list[int]:
    """Find ports of loopback that nobody listens at just now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


def scrape(urls: Mapping[str, str]) -> Pages:
    """Read the pages at these URLs; raise `PageMissing` when one cannot be read."""
    return {name: _read(url) for name, url in urls.items()}


def compare(urls: Mapping[str, str], done: Callable[[Pages], Iterable[Figure]], *, patience: float) -> list[Compared]:
    """Hold the pages against what was *done*, until they agree or *patience* seconds have passed.

    Work goes on meanwhile, and a run is counted a moment after its row is closed: pages count only when
    what was done has not changed while they were read.  Raises `PageMissing` when one is not there in the end.
    """
    ends = time.monotonic() + patience
    while True:
        try:
            pages = scrape(urls)
        except PageMissing:
            if time.monotonic() > ends:
                raise
        else:
            figures = list(done(pages))
            compared = [Compared(figure, figure.shown(pages)) for figure in figures]
            settled = figures == list(done(pages)) and all(one.agrees for one in compared)
            if settled or time.monotonic() > ends:
                return compared
        time.sleep(PAUSE)


def _read(url: str) -> list[Sample]:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:  # noqa: S310, a page of our own
            text = answer.read().decode()
    except (OSError, HTTPException) as error:
        raise PageMissing(f"cannot read {url}: {error}") from error
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]
