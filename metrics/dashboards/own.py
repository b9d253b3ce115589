"""Rows for metrics that a batch brings and that no panel of the dashboards asks for."""

from __future__ import annotations

from collections.abc import Iterator

from forgekeeper.batches import Declared, all_declared
from metrics.catalogue.metric import Counter, Gauge
from metrics.dashboards.panels import Query, Row, graph
from metrics.dashboards.queries import grown


def rows(text: str) -> Iterator[Row]:
    """Yield a row for each batch that brings something which the dashboards' *text* does not name."""
    for one in all_declared():
        brought = [own for own in _brought(one) if f"forgekeeper_{own.name}" not in text]
        if brought:
            panels = [graph(_title(own.name), own.help, "short", _query(own)) for own in brought]
            yield Row(f"{one.name}: what only it has", panels, folded=True)


def _brought(declared: Declared) -> Iterator[Counter | Gauge]:
    yield from declared.counters
    for collector in declared.collectors.values():
        yield from collector.gauges


def _query(own: Counter | Gauge) -> Query:
    if isinstance(own, Counter):
        return Query(
            grown(own.name, "batch" if own.by_batch else ""), "{{batch}}" if own.by_batch else _title(own.name)
        )
    by = f" by ({', '.join(own.labels)})" if own.labels else ""
    return Query(f"max{by} (forgekeeper_{own.name})", ", ".join(f"{{{{{label}}}}}" for label in own.labels))


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize()
