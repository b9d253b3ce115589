"""Every metric: `metrics.toml` has the engine's own, and batches declare additional ones.

Everything else follows from this table: counters, `docs/metrics.md`, the zeros of the first scrape, and the tests of
rules and dashboards.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

FILE = Path(__file__).parent / "metrics.toml"
NO_BATCH = "unknown"
"""Batch label of a dead letter that is unreadable or of no batch; it is lost work, too."""
UNREADABLE = (NO_BATCH, "message")
"""Labels of unreadable messages in quarantine, which belong to no batch."""
LEVELS = ("debug", "info", "warning", "error", "critical")
ERROR_KINDS = (
    *("database", "redis", "object_storage", "gitaly"),
    *("feature_flag", "state_transition", "time_limit", "other"),
)
BLOCKS = (
    *("no_store", "no_repositories", "git_server", "flag_unreadable"),
    *("installation", "redis_replaced", "clocks", "schema"),
)
"""Reasons why a batch may be blocked; each needs a person."""
HOLDS = ("breaker", "new")
"""Reasons why a batch may be held: an unusually large run, or a preview not yet seen."""
OFFS = ("flag_off", "cron_off")
SKIPS = ("overlap", "paused", "stopped", "held", "cancelled", "lease_held", "duplicate", "flag_off", *BLOCKS)
OPERATIONS = ("get", "head", "delete", "delete_many", "abort_uploads")
COLLECTORS = ("batches", "runs", "flags", "queues", "dead_letters", "leases", "roots", "quarantine", "clocks")
"""Collectors of the exporter, beside the collectors of batches."""
CLOCKS = (("postgresql", "host"), ("postgresql", "redis"), ("redis", "host"))
"""Pairs of clocks that are compared; "host" is the exporter's machine."""
Process = Literal["worker", "scheduler", "exporter"]
Children = tuple[tuple[str, ...], ...]
BUCKETS: dict[str, tuple[float, ...]] = {
    "none": (),
    # The limits in the documents are among these.
    "runs": (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 250.0, 300.0, 600.0, 1800.0),
    "requests": (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
}
"""Upper bounds of histogram buckets, in seconds."""


@dataclass(frozen=True)
class Metric:
    """A metric; *children* are all its label values, or None if the settings name them."""

    name: str
    labels: tuple[str, ...]
    children: Children | None
    help: str
    process: Process
    buckets: tuple[float, ...] = ()

    @property
    def type(self) -> Literal["counter", "gauge", "histogram"]:
        """Type of the metric in Prometheus."""
        if self.buckets:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"

    @property
    def is_instant(self) -> bool:
        """Whether the values are times."""
        return self.name.endswith("_timestamp_seconds")

    @property
    def unit(self) -> str:
        """Unit of the metric, or ""."""
        return "seconds" if self.name.endswith("_seconds") else ""

    @property
    def values(self) -> dict[str, tuple[str, ...] | None]:
        """Values of each label in order; None if the settings name them."""
        if self.children is None:
            return dict.fromkeys(self.labels)
        columns = list(zip(*self.children, strict=True)) or [()] * len(self.labels)
        return {label: tuple(dict.fromkeys(column)) for label, column in zip(self.labels, columns, strict=True)}


class Gauge(NamedTuple):
    """A gauge of a batch; *name* lacks the prefix, *children* are all values of its labels."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    children: Children = ((),)


class Counter(NamedTuple):
    """A counter of a batch; *name* has neither prefix nor suffix.

    It adds up *fields* of the outcome, or counts the runs that *stopped* for this reason. If *by_batch*, its label is
    the batch.

    >>> counter = Counter("pipelines_seen", "Pipelines that runs have counted.", ("pipelines",))
    """

    name: str
    help: str
    fields: tuple[str, ...] = ()
    stopped: str | None = None
    by_batch: bool = True


class Reading(NamedTuple):
    """A value of a gauge, named without prefix; *labels* are in the catalogue's order."""

    metric: str
    value: float
    labels: tuple[str, ...] = ()


def at(metric: str, instant: datetime | None, *labels: str) -> Iterator[Reading]:
    """Yield the instant as a reading, or nothing if it is None."""
    if instant is not None:
        yield Reading(metric, instant.timestamp(), labels)


def each(*values: Iterable[str]) -> Children:
    """Return all combinations of the labels' values."""
    return tuple(product(*values))


def series(declared: Iterable[Any]) -> dict[str, Children | None]:
    """Return the label sets of the *declared* batches and children, in order of declaration."""
    declared = tuple(declared)
    parents = [one for one in declared if one.parent is None]
    names, of_parents = [one.name for one in declared], [one.name for one in parents]
    in_families = [one for parent in parents for one in declared if parent.name in (one.name, one.parent)]
    queues = list(dict.fromkeys(one.queue for one in in_families))
    fan_outs = tuple((one.parent, one.name) for one in declared if one.parent is not None)
    records = [(one.name, record) for one in declared for record in one.records]

    def of(wanted: Callable[[Any], object]) -> Children:
        return tuple((name, record.name) for name, record in records if wanted(record))

    return {
        # Root names depend on the settings.
        "unbounded": None,
        "each": each(names),
        "parents": each(of_parents),
        "queues": each(queues),
        "collectors": each((*COLLECTORS, *(name for one in declared for name in one.collectors))),
        "levels": each(LEVELS),
        "operations": each(OPERATIONS),
        "clocks": CLOCKS,
        "info": tuple((one.name, str(one.document or "none"), one.queue, one.team) for one in declared),
        "failures": each(names, ERROR_KINDS),
        "skips": each(names, SKIPS),
        "holds": each(of_parents, HOLDS),
        "blocks": each(of_parents, BLOCKS),
        "offs": each(of_parents, OFFS),
        "depths": each(queues, ("ready", "unacked", "delayed")),
        "dead": each((*names, NO_BATCH)),
        "dead_letters": tuple((one.queue, one.name) for one in declared) + each(queues, [NO_BATCH]),
        "flags": each(flag for one in parents for flag in one.flags),
        "leases": each(one.name for one in declared if one.lease),
        "children": fan_outs,
        "quarantined": (*of(lambda record: record.quarantined), *fan_outs, UNREADABLE),
        "thresholds": tuple((one.name, limit.name) for one in declared for limit in one.thresholds),
        "examined": of(lambda record: record.examined),
        "processed": of(lambda record: record.processed),
        "sized": of(lambda record: record.bytes),
        "objectives": of(lambda record: record.objective is not None),
        "backlogs": of(lambda record: record.objective is not None or record.backlog),
        "errors": tuple((name, record.name, kind) for name, record in records for kind in record.errors),
    }


def table(declared: Iterable[Any]) -> dict[str, Metric]:
    """Return every metric by name, with the label sets of *declared*: batches, then children."""
    declared = tuple(declared)
    return {metric.name: metric for metric in (*_engine(series(declared)), *_batches(declared))}


def of(process: Process, metrics: Mapping[str, Metric]) -> list[Metric]:
    """Return the metrics of *process*."""
    return [metric for metric in metrics.values() if metric.process == process]


def _engine(known: Mapping[str, Children | None]) -> Iterator[Metric]:
    read = tomllib.loads(FILE.read_text())
    processes: tuple[Process, ...] = ("worker", "scheduler", "exporter")
    for process in processes:
        for name, facts in read[process].items():
            children = known[facts["series"]] if "series" in facts else ((),)
            labels, buckets = tuple(facts.get("labels", "").split()), BUCKETS[facts.get("buckets", "none")]
            yield Metric(f"forgekeeper_{name}", labels, children, facts["help"], process, buckets)


def _batches(declared: tuple[Any, ...]) -> Iterator[Metric]:
    counters = [(own, one.name) for one in declared for own in one.counters]
    for counter in {own.name: own for own, _ in counters}.values():
        owners = each(owner for own, owner in counters if own.name == counter.name)
        labels, children = (("batch",), owners) if counter.by_batch else ((), ((),))
        yield Metric(f"forgekeeper_{counter.name}_total", labels, children, counter.help, "worker")
    for gauge in [gauge for one in declared for collector in one.collectors.values() for gauge in collector.gauges]:
        yield Metric(f"forgekeeper_{gauge.name}", gauge.labels, gauge.children, gauge.help, "exporter")
