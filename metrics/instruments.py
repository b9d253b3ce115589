"""What counts: the metrics of the catalogue as objects of prometheus_client.

Where the variable ``PROMETHEUS_MULTIPROC_DIR`` was set before Python started they are kept
in files, from which one endpoint shows all processes together; elsewhere in memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import prometheus_client as prometheus
import structlog
from prometheus_client import CollectorRegistry, values
from prometheus_client.values import MutexValue

from metrics import room
from metrics.catalogue import of, table
from metrics.catalogue.metric import Metric, Process

# Each counter's date of birth would be one more series, and no rule asks for it.
prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
room.install()

log = structlog.get_logger(__name__)


class Instruments:
    """The metrics of one kind of process, each known by its full name; until `know` those that no batch brings."""

    def __init__(self, process: Process) -> None:
        self.registry = CollectorRegistry()
        self._process = process
        self._metrics: dict[str, Metric] = {}
        self._instruments: dict[str, Instrument] = {}
        self.know(table(()))

    def know(self, metrics: Mapping[str, Metric]) -> Instruments:
        """Take these for all there are; call it once batches are declared, before anything is counted of them."""
        self._metrics = {metric.name: metric for metric in of(self._process, metrics)}
        for name, metric in self._metrics.items():
            # A gauge without labels shows a zero at once, and no instant is zero: it is made when it is set.
            if metric.labels or not _is_instant(name):
                self._made(name)
        return self

    @property
    def in_files(self) -> bool:
        """Say whether an endpoint of all processes will see what is counted here."""
        return values.ValueClass is not MutexValue

    def has(self, name: str, *labels: str) -> bool:
        """Say whether the catalogue has this series."""
        return labels in (self._metrics[name].children or ())

    def inc(self, name: str, *labels: str, by: float = 1) -> None:
        """Count *by* more."""
        instrument = self._of(name, *labels)
        assert isinstance(instrument, prometheus.Counter | prometheus.Gauge)
        instrument.inc(by)

    def dec(self, name: str, *labels: str) -> None:
        """Count one less."""
        gauge = self._of(name, *labels)
        assert isinstance(gauge, prometheus.Gauge)
        gauge.dec()

    def set(self, name: str, *labels: str, to: float) -> None:
        """Set a gauge."""
        gauge = self._of(name, *labels)
        assert isinstance(gauge, prometheus.Gauge)
        gauge.set(to)

    def mark(self, name: str, *labels: str) -> None:
        """Set a gauge to this instant."""
        gauge = self._of(name, *labels)
        assert isinstance(gauge, prometheus.Gauge)
        gauge.set_to_current_time()

    def observe(self, name: str, *labels: str, seconds: float) -> None:
        """Note how long something took."""
        histogram = self._of(name, *labels)
        assert isinstance(histogram, prometheus.Histogram)
        histogram.observe(seconds)

    def zero(self) -> Instruments:
        """Create every series: one that first appears as a one never rises.  No instant is zero, so none is created."""
        for name, metric in self._metrics.items():
            for labels in (metric.children or ()) if not _is_instant(name) else ():
                self._of(name, *labels)
        for file in room.lacking:
            log.warning("counting in memory", file=file, error="no room on the disk of the metrics")
        return self

    def _of(self, name: str, *labels: str) -> Instrument:
        instrument = self._made(name)
        return instrument.labels(*labels) if labels else instrument

    def _made(self, name: str) -> Instrument:
        if name not in self._instruments:
            self._instruments[name] = _instrument(self._metrics[name], self.registry)
        return self._instruments[name]


def _is_instant(name: str) -> bool:
    return name.endswith("_timestamp_seconds")


Instrument = prometheus.Counter | prometheus.Gauge | prometheus.Histogram


def _instrument(metric: Metric, registry: CollectorRegistry) -> Instrument:
    if metric.type == "counter":
        return prometheus.Counter(metric.name, metric.help, metric.labels, registry=registry)
    if metric.type == "histogram":
        return prometheus.Histogram(metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets)
    # Of all processes of a worker: how many in those that live.
    return prometheus.Gauge(metric.name, metric.help, metric.labels, registry=registry, multiprocess_mode="livesum")
