"""The catalogue of metrics (`metrics`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer

from forgekeeper.batches import all_declared
from forgekeeper.cli.console import Json, emit, out
from metrics.catalogue import of, table
from metrics.catalogue.metric import Metric, Process

INTRODUCTION = """# Metrics

Three processes each serve a page: workers what has happened, all of `forgekeeper worker`'s
processes together; schedulers what they have sent; exporters what is the case, asked of
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
    return INTRODUCTION + "".join(tables) + _values(metrics.values())


def _table(metrics: Iterable[Metric]) -> str:
    rows = "".join(
        f"| `{m.name}` | {m.type} | {', '.join(f'`{label}`' for label in m.labels)} | {m.unit} | {m.help} |\n"
        for m in metrics
    )
    return f"| name | type | labels | unit | what it says |\n|---|---|---|---|---|\n{rows}"


def _values(metrics: Iterable[Metric]) -> str:
    """List what each label may be; whatever is not listed does not occur."""
    found: dict[str, dict[str, None] | None] = {}
    for metric in metrics:
        for label, values in metric.values.items():
            known = found.setdefault(label, {})
            if values is None or known is None:
                found[label] = None
            else:
                known.update(dict.fromkeys(values))
    rows = "".join(
        f"| `{label}` | {', '.join(f'`{value}`' for value in values) if values else 'as configured'} |\n"
        for label, values in found.items()
    )
    return f"\n## Labels\n\n| label | values |\n|---|---|\n{rows}"
