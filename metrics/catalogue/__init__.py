"""Every metric: its name, type, labels and their values, unit, help, and the process whose endpoint has it.

All else follows from this table: what is counted, `docs/metrics.md`, the zeros of the first
scrape, and the tests of rules and dashboards.  It follows itself from what is declared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from metrics.catalogue import exporter, scheduler, worker
from metrics.catalogue.declared import Declared
from metrics.catalogue.endpoint import Endpoint
from metrics.catalogue.labels import Labels
from metrics.catalogue.metric import Metric, Process


def table(declared: Iterable[Declared]) -> dict[str, Metric]:
    """Return every metric by its name, with the label sets of what is *declared*: batches first, then children."""
    labels = Labels(declared)
    endpoints = Endpoint("worker"), Endpoint("scheduler"), Endpoint("exporter")
    for endpoint, write in zip(endpoints, (worker.write, scheduler.write, exporter.write), strict=True):
        write(endpoint, labels)
    return {metric.name: metric for endpoint in endpoints for metric in endpoint.metrics}


def of(process: Process, metrics: Mapping[str, Metric]) -> list[Metric]:
    """List those of the *metrics* that the endpoint of *process* has."""
    return [metric for metric in metrics.values() if metric.process == process]
