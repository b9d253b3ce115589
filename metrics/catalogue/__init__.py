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

CATALOGUE_FILE = Path(__file__).parent / "metrics.toml"
NO_BATCH = "unknown"
"""Batch label of a dead letter that is unreadable or of no batch; it is lost work, too."""
UNREADABLE_LABELS = (NO_BATCH, "message")
"""Labels of unreadable messages in quarantine, which belong to no batch."""
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
ERROR_KINDS = (
    *("database", "redis", "object_storage", "gitaly"),
    *("feature_flag", "state_transition", "time_limit", "other"),
)
BLOCKED_REASONS = (
    *("no_store", "no_repositories", "git_server", "flag_unreadable"),
    *("installation", "redis_replaced", "clocks", "schema"),
)
"""Reasons why a batch may be blocked; each needs a person."""
HOLD_REASONS = ("breaker", "new")
"""Reasons why a batch may be held: an unusually large run, or a preview not yet seen."""
OFF_REASONS = ("flag_off", "cron_off")
SKIP_REASONS = (
    "overlap",
    "paused",
    "stopped",
    "held",
    "cancelled",
    "lease_held",
    "duplicate",
    "flag_off",
    *BLOCKED_REASONS,
)
STORE_OPERATIONS = ("get", "head", "delete", "delete_many", "abort_uploads")
ENGINE_COLLECTORS = (
    *("batches", "runs", "flags", "queues", "dead_letters"),
    *("leases", "roots", "quarantine", "clocks", "events"),
)
"""Collectors of the exporter, beside the collectors of batches."""
CLOCK_PAIRS = (("postgresql", "host"), ("postgresql", "redis"), ("redis", "host"))
"""Pairs of clocks that are compared; "host" is the exporter's machine."""
ProcessKind = Literal["worker", "scheduler", "exporter"]
LabelSets = tuple[tuple[str, ...], ...]
HISTOGRAM_BUCKETS: dict[str, tuple[float, ...]] = {
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
    children: LabelSets | None
    help: str
    process: ProcessKind
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
    children: LabelSets = ((),)


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


def read_instant(metric: str, instant: datetime | None, *labels: str) -> Iterator[Reading]:
    """Yield the instant as a reading, or nothing if it is None."""
    if instant is not None:
        yield Reading(metric, instant.timestamp(), labels)


def combine_labels(*values: Iterable[str]) -> LabelSets:
    """Return all combinations of the labels' values."""
    return tuple(product(*values))


def collect_label_sets(declared: Iterable[Any]) -> dict[str, LabelSets | None]:
    """Return the label sets of the *declared* batches and children, in order of declaration."""
    declared = tuple(declared)
    parents = [one for one in declared if one.parent_name is None]
    names, of_parents = [one.name for one in declared], [one.name for one in parents]
    in_families = [one for parent in parents for one in declared if parent.name in (one.name, one.parent_name)]
    queues = list(dict.fromkeys(one.queue for one in in_families))
    fan_outs = tuple((one.parent_name, one.name) for one in declared if one.parent_name is not None)
    records = [(one.name, record) for one in declared for record in one.records]

    def list_record_labels(wanted: Callable[[Any], object]) -> LabelSets:
        return tuple((name, record.name) for name, record in records if wanted(record))

    return {
        # Root names depend on the settings.
        "unbounded": None,
        "each": combine_labels(names),
        "parents": combine_labels(of_parents),
        "queues": combine_labels(queues),
        "collectors": combine_labels((*ENGINE_COLLECTORS, *(name for one in declared for name in one.collectors))),
        "levels": combine_labels(LOG_LEVELS),
        "operations": combine_labels(STORE_OPERATIONS),
        "clocks": CLOCK_PAIRS,
        "info": tuple((one.name, str(one.document or "none"), one.queue, one.team) for one in declared),
        "failures": combine_labels(names, ERROR_KINDS),
        "skips": combine_labels(names, SKIP_REASONS),
        "holds": combine_labels(of_parents, HOLD_REASONS),
        "blocks": combine_labels(of_parents, BLOCKED_REASONS),
        "offs": combine_labels(of_parents, OFF_REASONS),
        "depths": combine_labels(queues, ("ready", "unacked", "delayed")),
        "dead": combine_labels((*names, NO_BATCH)),
        "dead_letters": tuple((one.queue, one.name) for one in declared) + combine_labels(queues, [NO_BATCH]),
        "flags": combine_labels(flag for one in parents for flag in one.flags),
        "leases": combine_labels(one.name for one in declared if one.lease),
        "children": fan_outs,
        "quarantined": (*list_record_labels(lambda record: record.may_be_quarantined), *fan_outs, UNREADABLE_LABELS),
        "thresholds": tuple((one.name, limit.name) for one in declared for limit in one.thresholds),
        "examined": list_record_labels(lambda record: record.examined),
        "processed": list_record_labels(lambda record: record.processed),
        "sized": list_record_labels(lambda record: record.bytes),
        "objectives": list_record_labels(lambda record: record.objective is not None),
        "backlogs": list_record_labels(lambda record: record.objective is not None or record.backlog),
        "errors": tuple((name, record.name, kind) for name, record in records for kind in record.errors),
    }


def build_metrics(declared: Iterable[Any]) -> dict[str, Metric]:
    """Return every metric by name, with the label sets of *declared*: batches, then children."""
    declared = tuple(declared)
    return {
        metric.name: metric
        for metric in (*_read_engine_metrics(collect_label_sets(declared)), *_list_batch_metrics(declared))
    }


def select_metrics(process: ProcessKind, metrics: Mapping[str, Metric]) -> list[Metric]:
    """Return the metrics of *process*."""
    return [metric for metric in metrics.values() if metric.process == process]


def _read_engine_metrics(label_sets: Mapping[str, LabelSets | None]) -> Iterator[Metric]:
    read = tomllib.loads(CATALOGUE_FILE.read_text())
    processes: tuple[ProcessKind, ...] = ("worker", "scheduler", "exporter")
    for process in processes:
        for name, facts in read[process].items():
            children = label_sets[facts["series"]] if "series" in facts else ((),)
            labels, buckets = tuple(facts.get("labels", "").split()), HISTOGRAM_BUCKETS[facts.get("buckets", "none")]
            yield Metric(f"forgekeeper_{name}", labels, children, facts["help"], process, buckets)


def _list_batch_metrics(declared: tuple[Any, ...]) -> Iterator[Metric]:
    counters = [(own, one.name) for one in declared for own in one.counters]
    for counter in {own.name: own for own, _ in counters}.values():
        owners = combine_labels(owner for own, owner in counters if own.name == counter.name)
        labels, children = (("batch",), owners) if counter.by_batch else ((), ((),))
        yield Metric(f"forgekeeper_{counter.name}_total", labels, children, counter.help, "worker")
    for gauge in [gauge for one in declared for collector in one.collectors.values() for gauge in collector.gauges]:
        yield Metric(f"forgekeeper_{gauge.name}", gauge.labels, gauge.children, gauge.help, "exporter")
