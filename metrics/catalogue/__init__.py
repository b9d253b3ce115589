"""Every metric: its name, type, labels and their values, unit, help, and the process whose endpoint has it.

All else follows from this table: what is counted, `docs/metrics.md`, the zeros of the first
scrape, and the tests of rules and dashboards.  It follows itself from what is declared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from metrics.catalogue import exporter, scheduler, worker
from metrics.catalogue.declared import Declared
from metrics.catalogue.labels import Labels
from metrics.catalogue.metric import Metric, Process
from metrics.catalogue.page import Page


def table(declared: Iterable[Declared]) -> dict[str, Metric]:
    """Return every metric by its name, with the label sets of what is *declared*: batches first, then children."""
    labels = Labels(declared)
    pages = Page("worker"), Page("scheduler"), Page("exporter")
    for page, write in zip(pages, (worker.write, scheduler.write, exporter.write), strict=True):
        write(page, labels)
    return {metric.name: metric for page in pages for metric in page.metrics}


def of(process: Process, metrics: Mapping[str, Metric]) -> list[Metric]:
    """List those of the *metrics* that the endpoint of *process* has."""
    return [metric for metric in metrics.values() if metric.process == process]
