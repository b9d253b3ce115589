"""What counts: the metrics of the catalogue as objects of prometheus_client.

Where the variable ``PROMETHEUS_MULTIPROC_DIR`` was set before Python started they are kept
in files, from which one endpoint shows all processes together; elsewhere in memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import prometheus_client as prometheus
from prometheus_client import CollectorRegistry, values
from prometheus_client.values import MutexValue

from metrics import process_id, room
from metrics.catalogue import of, table
from metrics.catalogue.metric import Metric, Process

# Each counter's date of birth would be one more series, and no rule asks for it.
prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
room.install()
IN_FILES = values.ValueClass is not MutexValue
if IN_FILES:
    process_id.install()


class Instruments:
    """The metrics of one kind of process, each known by its full name; until `know` those that no batch brings."""

    def __init__(self, process: Process) -> None:
        self.registry = CollectorRegistry()
        self._process = process
        self._metrics: list[Metric] = []
        self._instruments: dict[str, Instrument] = {}
        self._series: dict[tuple[str, ...], Instrument] = {}
        self.know(table(()))

    def know(self, metrics: Mapping[str, Metric]) -> Instruments:
        """Take these for all there are; call it once batches are declared, before anything is counted of them."""
        self._metrics = of(self._process, metrics)
        for metric in self._metrics:
            if metric.name not in self._instruments:
                self._instruments[metric.name] = _instrument(metric, self.registry)
        return self

    @property
    def in_files(self) -> bool:
        """Say whether an endpoint of all processes will see what is counted here."""
        return IN_FILES

    def inc(self, name: str, *labels: str, by: float = 1) -> None:
        """Count *by* more."""
        if not by:
            return
        instrument = self._of(name, *labels)
        assert isinstance(instrument, RISING)
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
        for metric in self._metrics:
            for labels in (metric.children or ()) if not metric.name.endswith("_timestamp_seconds") else ():
                self._of(metric.name, *labels)
        return self

    def _of(self, *series: str) -> Instrument:
        """Return what counts the series, a metric's name and the values of its labels.

        It is remembered: to ask the client for it takes as long as to count.
        """
        known = self._series.get(series)
        if known is None:
            name, *labels = series
            instrument = self._instruments[name]
            known = self._series[series] = instrument.labels(*labels) if labels else instrument
        return known


Instrument = prometheus.Counter | prometheus.Gauge | prometheus.Histogram
RISING = (prometheus.Counter, prometheus.Gauge)


def _instrument(metric: Metric, registry: CollectorRegistry) -> Instrument:
    if metric.type == "counter":
        return prometheus.Counter(metric.name, metric.help, metric.labels, registry=registry)
    if metric.type == "histogram":
        return prometheus.Histogram(metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets)
    # Of all processes of a worker: how many in those that live.
    return prometheus.Gauge(metric.name, metric.help, metric.labels, registry=registry, multiprocess_mode="livesum")
