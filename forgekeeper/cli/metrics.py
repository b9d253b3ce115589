"""`metrics`: the catalogue of metrics, and the page of documentation about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer

from forgekeeper.batches import all_declared
from forgekeeper.cli.console import Json, emit, markdown_table, out
from metrics.catalogue import of, table
from metrics.catalogue.metric import Metric, Process

INTRODUCTION = """# Metrics

Three processes each serve metrics: workers what has happened, all of `forgekeeper worker`'s
processes together; schedulers what they have sent; exporters the present state, asked of
PostgreSQL and Redis when they are scraped. Every series is there from the first scrape on,
at zero if it can be; a time that does not apply is absent.

This page is printed by `forgekeeper metrics --markdown`.
"""
PAGES: dict[Process, str] = {
    "worker": "`forgekeeper worker`, at `FORGEKEEPER_METRICS_PORT_WORKER`",
    "scheduler": "`forgekeeper scheduler`, at `FORGEKEEPER_METRICS_PORT_SCHEDULER`",
    "exporter": "`forgekeeper exporter`, at `FORGEKEEPER_METRICS_PORT_EXPORTER`",
}


def metrics(
    json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/metrics.md.")] = False,
) -> None:
    """List every metric with its type, labels, unit and sentence."""
    known = table(all_declared())
    if json:
        emit({"metrics": [_facts(metric) for metric in known.values()]})
    elif markdown:
        out.print(page(known), end="")
    else:
        for metric in known.values():
            labels = f"{{{', '.join(metric.labels)}}}" if metric.labels else ""
            out.print(f"{metric.name}{labels}  ({metric.type}, {metric.process})", style="bold")
            out.print(f"    {metric.help}")


def _facts(metric: Metric) -> dict[str, Any]:
    return asdict(metric) | {"labels": metric.values, "type": metric.type, "unit": metric.unit}


def page(metrics: Mapping[str, Metric]) -> str:
    """Write the documentation's page of metrics."""
    tables = [f"\n## {text}\n\n{_table(of(process, metrics))}" for process, text in PAGES.items()]
    return INTRODUCTION + "".join(tables) + _labels(metrics.values())


def _table(metrics: Iterable[Metric]) -> str:
    rows = ((f"`{m.name}`", m.type, _code(m.labels), m.unit, m.help) for m in metrics)
    return markdown_table(("name", "type", "labels", "unit", "what it says"), rows)


def _labels(metrics: Iterable[Metric]) -> str:
    """List the values of each label."""
    found: dict[str, dict[str, None] | None] = {}
    for metric in metrics:
        for label, values in metric.values.items():
            known = found.setdefault(label, {})
            if values is None or known is None:
                found[label] = None
            else:
                known.update(dict.fromkeys(values))
    rows = ((f"`{label}`", _code(values) if values else "as configured") for label, values in found.items())
    return "\n## Labels\n\n" + markdown_table(("label", "values"), rows)


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)
