"""The exporter: what is the case, asked of PostgreSQL, Redis and the disks when it is scraped.

Each collector asks in a thread of its own, for at most so long: one that fails, or does not
come back, is missing from the answer and named there, and the others are none the worse.
Nothing is kept: any number of exporters agree.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector as Collecting

from forgekeeper.batches import all_declared
from forgekeeper.connections import Limits
from forgekeeper.database import Timeouts
from forgekeeper.declaring.shown import Collector
from forgekeeper.observing import collectors
from forgekeeper.settings import Settings
from metrics.catalogue import of, table
from metrics.catalogue.metric import Reading

BRIEF = timedelta(seconds=2)
LIMITS = Limits(Timeouts(BRIEF, BRIEF, BRIEF, BRIEF, BRIEF), BRIEF)
"""How long an exporter waits for an answer; none is asked for twice."""
PATIENCE = 1.7
"""Seconds that all collectors have together, so that a scrape is answered within two."""


class Exporter(Collecting):
    """The readings of all collectors, and how each of them fared."""

    def __init__(self, settings: Settings) -> None:
        self._metrics = of("exporter", table(all_declared()))
        self._constants = list(collectors.constants())
        found = collectors.all_collectors(settings)
        self._probes = [collectors.Probe(name, partial(_ask, collector, settings)) for name, collector in found.items()]
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Family]:
        """Ask everything, once at a time."""
        found: dict[str, list[Reading]] = defaultdict(list)
        with self._lock:
            for reading in (*self._constants, *self._readings()):
                found[f"forgekeeper_{reading.metric}"].append(reading)
        for metric in self._metrics:
            family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
            for reading in found[metric.name]:
                family.add_metric(reading.labels, reading.value)
            yield family

    def _readings(self) -> Iterator[Reading]:
        for probe, answer in zip(self._probes, collectors.asked(self._probes, PATIENCE), strict=True):
            yield Reading("exporter_collector_success", float(answer is not None), (probe.name,))
            yield Reading("exporter_collector_duration_seconds", probe.seconds, (probe.name,))
            yield from answer or ()


def registry(settings: Settings) -> CollectorRegistry:
    """Return what the metrics endpoint of this process shows."""
    shown = CollectorRegistry()
    shown.register(Exporter(settings))
    return shown


def _ask(collector: Collector, settings: Settings) -> list[Reading]:
    with collectors.connected() if collector.database else nullcontext():
        return list(collector.look(settings))
