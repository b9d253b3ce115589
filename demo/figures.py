"""What the metrics must show when the sample data was worked off; their endpoints are read as Prometheus reads them."""

from __future__ import annotations

import socket
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from http.client import HTTPException
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample as Series

from demo.sample_data import MALFORMED, REFUSED, Sample
from forgekeeper.batches import all_declared
from metrics.catalogue import series

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
            one.value
            for one in pages[self.page]
            if one.name == f"forgekeeper_{self.metric}" and self.labels.items() <= one.labels.items()
        ]
        return sum(values) if values else None


def figures(before: Mapping[str, Sample]) -> Iterator[Figure]:
    """Yield what the metrics must show of the sample data that was there *before*, and that nothing failed."""
    due = {batch: sample.due for batch, sample in before.items()}
    processed = (
        ("user_status_cleanup", "user_status", due["user_status_cleanup"]),
        ("clean_project_refs", "git_ref_deletion", due["git_ref_cleanup"]),
        ("delete_artifact_bucket", "expired_artifact", due["expired_job_artifacts"]),
        # Also the object that never arrived.
        ("delete_objects", "deleted_object", due["expired_job_artifacts"]),
        ("stale_direct_uploads", "stale_upload", due["stale_direct_uploads"] - len(MALFORMED)),
        ("stale_imports", "bulk_import", due["stale_imports"]),
        ("stale_imports", "entity", 2 * due["stale_imports"]),
        # Of an entity's four trackers three are unfinished.
        ("stale_imports", "tracker", 6 * due["stale_imports"]),
    )
    for batch, record, count in processed:
        yield Figure("worker", "records_processed_total", {"batch": batch, "record": record}, count)
    refs = {"batch": "clean_project_refs", "record": "git_ref_deletion"}
    yield Figure("worker", "record_errors_total", refs, len(REFUSED))
    yield Figure("exporter", "backlog_records", refs, 0)
    yield Figure("exporter", "quarantine_records", {"record": "rejected_ref"}, len(REFUSED))
    yield Figure("exporter", "quarantine_records", {"record": "failed_upload"}, len(MALFORMED))
    for failed in ("run_failures_total", "run_retries_total", "run_dead_letters_total"):
        yield Figure("worker", failed, {}, 0)
    yield Figure("exporter", "exporter_collector_success", {}, len(series(all_declared())["collectors"] or ()))


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


def compare(urls: Mapping[str, str], expected: Sequence[Figure], *, timeout: float) -> Compared:
    """Compare what is shown with what is expected, until they agree or *timeout* seconds have passed."""
    ends = time.monotonic() + timeout
    while True:
        pages = scrape(urls)
        compared = [(figure, figure.shown(pages)) for figure in expected]
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
