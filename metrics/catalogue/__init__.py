"""Every metric: `metrics.toml` holds the engine's own, and each batch brings those that only it has.

All else follows from this table: what is counted, `docs/metrics.md`, the zeros of the first scrape, and the tests of
rules and dashboards.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from metrics.catalogue.labels import each, series
from metrics.catalogue.metric import BUCKETS, Children, Metric, Process

FILE = Path(__file__).parent / "metrics.toml"


def table(declared: Iterable[Any]) -> dict[str, Metric]:
    """Return every metric by its name, with the label sets of what is *declared*: batches first, then children."""
    declared = tuple(declared)
    return {metric.name: metric for metric in (*_engine(series(declared)), *_batches(declared))}


def of(process: Process, metrics: Mapping[str, Metric]) -> list[Metric]:
    """List those of the *metrics* that the endpoint of *process* has."""
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
