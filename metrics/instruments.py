"""Instruments: the catalogue's metrics as objects of prometheus_client.

If the variable ``PROMETHEUS_MULTIPROC_DIR`` was set before Python started, values are kept in files, and one endpoint
shows all processes together; otherwise values are in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import prometheus_client as prometheus
import structlog
from prometheus_client import CollectorRegistry, values
from prometheus_client.values import MutexValue

from metrics.catalogue import LOG_LEVELS, NO_BATCH, Metric, ProcessKind, build_metrics, select_metrics
from metrics.full_disk import AllocatedFile, files_without_space

BREACHES_METRIC = "forgekeeper_threshold_breaches_total"
DEAD_LETTERS_METRIC = "forgekeeper_run_dead_letters_total"

log = structlog.get_logger(__name__)


# The creation time of each counter would be an additional series, which no rule uses.
prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
values.MmapedDict = AllocatedFile  # type: ignore[assignment,attr-defined]


class Instruments:
    """Metrics of one kind of process, by full name; before `declare_metrics`, only the engine's own."""

    def __init__(self, process: ProcessKind) -> None:
        self.registry = CollectorRegistry()
        self._process = process
        self._metrics: dict[str, Metric] = {}
        self._instruments: dict[str, Any] = {}
        self._children: dict[tuple[str, tuple[str, ...]], Any] = {}
        self.declare_metrics(build_metrics(()))

    def declare_metrics(self, metrics: Mapping[str, Metric]) -> Instruments:
        """Replace the metrics; call it once the batches are declared, before anything is counted."""
        self._metrics = {metric.name: metric for metric in select_metrics(self._process, metrics)}
        for metric in self._metrics.values():
            # A gauge without labels exports 0 at once, which is not a valid time: it is created when it is set.
            if metric.labels or not metric.is_instant:
                self._ensure_instrument(metric)
        return self

    @property
    def uses_files(self) -> bool:
        """Return True if the endpoint of all processes sees this process's values."""
        return values.ValueClass is not MutexValue

    def has_series(self, name: str, *labels: str) -> bool:
        """Check whether the catalogue has this series."""
        return labels in (self._metrics[name].children or ())

    def inc(self, name: str, *labels: str, by: float = 1) -> None:
        """Increase a counter or gauge by *by*, which may be negative for a gauge."""
        self._find_child(name, labels).inc(by)

    def set(self, name: str, *labels: str, to: float) -> None:
        """Set a gauge."""
        self._find_child(name, labels).set(to)

    def set_to_now(self, name: str, *labels: str) -> None:
        """Set a gauge to the current time."""
        self._find_child(name, labels).set_to_current_time()

    def observe(self, name: str, *labels: str, seconds: float) -> None:
        """Observe a duration in a histogram."""
        self._find_child(name, labels).observe(seconds)

    def create_all_series(self) -> Instruments:
        """Create every series with value 0: Prometheus sees no increase if a series starts at 1.

        Gauges of times are not created, because 0 is not a valid time.
        """
        for name, metric in self._metrics.items():
            for labels in (metric.children or ()) if not metric.is_instant else ():
                self._find_child(name, labels)
        for file in files_without_space:
            log.warning("metrics counted in memory", file=file, error="no space on the disk of the metrics")
        return self

    def _find_child(self, name: str, labels: tuple[str, ...]) -> Any:
        # prometheus_client's `labels` locks, and converts each label.
        if (name, labels) not in self._children:
            instrument = self._ensure_instrument(self._metrics[name])
            self._children[name, labels] = instrument.labels(*labels) if labels else instrument
        return self._children[name, labels]

    def _ensure_instrument(self, metric: Metric) -> Any:
        if metric.name not in self._instruments:
            kinds = {"counter": prometheus.Counter, "histogram": prometheus.Histogram, "gauge": prometheus.Gauge}
            options: dict[str, Any] = {"buckets": metric.buckets} if metric.buckets else {}
            if metric.type == "gauge":
                # The sum over the living processes of a worker.
                options["multiprocess_mode"] = "livesum"
            made = kinds[metric.type](metric.name, metric.help, metric.labels, registry=self.registry, **options)
            self._instruments[metric.name] = made
        return self._instruments[metric.name]


WORKER_METRICS = Instruments("worker")
"""Metrics of this process as a worker; the endpoint shows a worker's processes together."""


def count_dead_letter(actor: str) -> None:
    """Count a dead letter of *actor*, which may be unknown."""
    known = WORKER_METRICS.has_series(DEAD_LETTERS_METRIC, actor)
    WORKER_METRICS.inc(DEAD_LETTERS_METRIC, actor if known else NO_BATCH)
    if WORKER_METRICS.has_series(BREACHES_METRIC, actor, "dead_letter"):
        WORKER_METRICS.inc(BREACHES_METRIC, actor, "dead_letter")


def count_log_line(level: str) -> None:
    """Count a log line; a failure is not logged, as that would be another line."""
    with suppress(Exception):
        WORKER_METRICS.inc("forgekeeper_log_messages_total", level if level in LOG_LEVELS else "info")
