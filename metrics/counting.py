"""What counts: the metrics of the catalogue as objects of prometheus_client, and the one of this process.

Where the variable ``PROMETHEUS_MULTIPROC_DIR`` was set before Python started they are kept in files, from which one
endpoint shows all processes together; elsewhere in memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import prometheus_client as prometheus
import structlog
from prometheus_client import CollectorRegistry, values
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.values import MutexValue

from metrics.catalogue import LEVELS, NO_BATCH, Metric, Process, of, table

ROOM = 1 << 18
"""Bytes of a file; more than all series of one process need: one that grows later does not ask for room."""
BREACHES = "forgekeeper_threshold_breaches_total"
DEAD_LETTERS = "forgekeeper_run_dead_letters_total"

lacking: list[str] = []
"""The files that there was no room for."""

log = structlog.get_logger(__name__)


class RoomyFile(MmapedDict):
    """Patch of `prometheus_client.values.MmapedDict`: a file to count in, with room for all that will be counted.

    Those of prometheus_client 0.26.0 are sparse.  Where the disk has no room for a page of a mapped file, the kernel
    kills the process that writes there.  So each gets its room when it is made, and a process that gets none counts in
    memory: it goes on, and only the endpoint lacks its share.  The patch may go when
    `test_the_clients_files_have_no_room_of_their_own` in `tests/metrics/test_endpoint.py` fails.
    """

    def __init__(self, filename: str) -> None:
        try:
            with Path(filename).open("ab") as file:
                try:
                    os.posix_fallocate(file.fileno(), 0, ROOM)
                except OSError:
                    file.truncate(0)
                    raise
            super().__init__(filename)  # type: ignore[no-untyped-call]
        except OSError:
            lacking.append(Path(filename).name)
            memory = os.memfd_create("metrics")
            os.truncate(memory, ROOM)
            super().__init__(f"/proc/self/fd/{memory}")  # type: ignore[no-untyped-call]
            os.close(memory)


# Each counter's date of birth would be one more series, and no rule asks for it.
prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
values.MmapedDict = RoomyFile  # type: ignore[assignment,attr-defined]


class Instruments:
    """The metrics of one kind of process, each known by its full name; until `know` those that no batch brings."""

    def __init__(self, process: Process) -> None:
        self.registry = CollectorRegistry()
        self._process = process
        self._metrics: dict[str, Metric] = {}
        self._instruments: dict[str, Any] = {}
        self.know(table(()))

    def know(self, metrics: Mapping[str, Metric]) -> Instruments:
        """Take these for all there are; call it once batches are declared, before anything is counted of them."""
        self._metrics = {metric.name: metric for metric in of(self._process, metrics)}
        for metric in self._metrics.values():
            # A gauge without labels shows a zero at once, and no instant is zero: it is made when it is set.
            if metric.labels or not metric.is_instant:
                self._made(metric)
        return self

    @property
    def in_files(self) -> bool:
        """Say whether an endpoint of all processes will see what is counted here."""
        return values.ValueClass is not MutexValue

    def has(self, name: str, *labels: str) -> bool:
        """Say whether the catalogue has this series."""
        return labels in (self._metrics[name].children or ())

    def inc(self, name: str, *labels: str, by: float = 1) -> None:
        """Count *by* more; of a gauge it may be less than none."""
        self._of(name, labels).inc(by)

    def set(self, name: str, *labels: str, to: float) -> None:
        """Set a gauge."""
        self._of(name, labels).set(to)

    def mark(self, name: str, *labels: str) -> None:
        """Set a gauge to this instant."""
        self._of(name, labels).set_to_current_time()

    def observe(self, name: str, *labels: str, seconds: float) -> None:
        """Note how long something took."""
        self._of(name, labels).observe(seconds)

    def zero(self) -> Instruments:
        """Create every series: one that first appears as a one never rises.  No instant is zero, so none is created."""
        for name, metric in self._metrics.items():
            for labels in (metric.children or ()) if not metric.is_instant else ():
                self._of(name, labels)
        for file in lacking:
            log.warning("counting in memory", file=file, error="no room on the disk of the metrics")
        return self

    def _of(self, name: str, labels: tuple[str, ...]) -> Any:
        instrument = self._made(self._metrics[name])
        return instrument.labels(*labels) if labels else instrument

    def _made(self, metric: Metric) -> Any:
        if metric.name not in self._instruments:
            kinds = {"counter": prometheus.Counter, "histogram": prometheus.Histogram, "gauge": prometheus.Gauge}
            options: dict[str, Any] = {"buckets": metric.buckets} if metric.buckets else {}
            if metric.type == "gauge":
                # Of all processes of a worker: how many in those that live.
                options["multiprocess_mode"] = "livesum"
            made = kinds[metric.type](metric.name, metric.help, metric.labels, registry=self.registry, **options)
            self._instruments[metric.name] = made
        return self._instruments[metric.name]


WORKER = Instruments("worker")
"""What this process counts as a worker, for the endpoint that shows all processes of one together."""


def dead_lettered(actor: str) -> None:
    """Count a message of that actor, which may be anything, as a dead letter."""
    known = WORKER.has(DEAD_LETTERS, actor)
    WORKER.inc(DEAD_LETTERS, actor if known else NO_BATCH)
    if WORKER.has(BREACHES, actor, "dead_letter"):
        WORKER.inc(BREACHES, actor, "dead_letter")


def line_written(level: str) -> None:
    """Count a log line; there is no line about one that cannot be counted."""
    with suppress(Exception):
        WORKER.inc("forgekeeper_log_messages_total", level if level in LEVELS else "info")
