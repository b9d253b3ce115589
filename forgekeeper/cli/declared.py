"""What is declared: `settings`, `metrics` and `batches`, and the pages of documentation that are printed from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from forgekeeper.batches import BATCHES, BatchSpec, Declared, Record, all_declared
from forgekeeper.boot import load
from forgekeeper.cli.connection import batch_named
from forgekeeper.cli.console import Json, emit, out
from forgekeeper.settings import PREFIX, Settings
from forgekeeper.settings.reading import Described, describe
from metrics.catalogue import of, table
from metrics.catalogue.metric import Metric, Process

SETTINGS = """# Settings

Settings are environment variables, or lines of a file `.env` where the command runs; the
environment wins. An unknown name that begins with `FORGEKEEPER_`, or a value that does not
fit, stops the start and is named. `forgekeeper settings` shows the present values.

This page is printed by `forgekeeper settings --markdown`.

"""
METRICS = """# Metrics

Three processes each serve metrics: workers what has happened, all of `forgekeeper worker`'s
processes together; schedulers what they have sent; exporters the present state, asked of
PostgreSQL and Redis when they are scraped. Every series is there from the first scrape on,
at zero if it can be; a time that does not apply is absent.

This page is printed by `forgekeeper metrics --markdown`.
"""
PROCESSES: tuple[Process, ...] = ("worker", "scheduler", "exporter")
FROM = {"environment": ", from the environment", ".env": ", from the file .env"}

Markdown = Annotated[bool, typer.Option("--markdown", help="Print the page of the documentation.")]


def settings(json: Json = False, markdown: Markdown = False) -> None:
    """List every setting with its type, default, present value, where that comes from, and sentence.

    Settings are environment variables, or lines of a file `.env` where the command runs.
    """
    described = describe(load())
    if json:
        emit([asdict(one) for one in described])
    elif markdown:
        out.print(settings_page(described), end="")
    else:
        for one in described:
            default = f", default {one.default}" if one.default else ""
            _show(f"{one.name}={one.value}  ({one.type}{default}{FROM.get(one.source, '')})", one.sentence)


def metrics(json: Json = False, markdown: Markdown = False) -> None:
    """List every metric with its type, labels, unit and sentence."""
    known = table(all_declared())
    if json:
        facts = [asdict(one) | {"labels": one.values, "type": one.type, "unit": one.unit} for one in known.values()]
        emit({"metrics": facts})
    elif markdown:
        out.print(metrics_page(known), end="")
    else:
        for one in known.values():
            labels = f"{{{', '.join(one.labels)}}}" if one.labels else ""
            _show(f"{one.name}{labels}  ({one.type}, {one.process})", one.help)


def batches(
    batch: Annotated[str | None, typer.Argument(help="Only this one.", show_default=False)] = None,
    json: Json = False,
) -> None:
    """List the batches; with --json all that they have declared, times in seconds."""
    settings, chosen = load(), [batch_named(batch)] if batch else list(BATCHES.values())
    if json:
        emit({"batches": {one.name: _batch(one, settings) for one in chosen}})
        return
    for one in chosen:
        writes = f", writes by itself: {one.writes}" if one.writes else ""
        _show(f"{one.name}  ({settings.cron(one.name) or 'off'}, queue {one.queue}{writes})", one.sentence)


def _show(heading: str, sentence: str) -> None:
    out.print(heading, style="bold")
    out.print(f"    {sentence}")


def _batch(batch: BatchSpec, settings: Settings) -> dict[str, Any]:
    return _declared(batch) | {
        "document": batch.document,
        "module": batch.module,
        "team": batch.team,
        "schedule": str(settings.cron(batch.name) or "off"),
        "flag": batch.flag,
        "tables": [table._meta.table_name for table in batch.tables],
        "deletes_from": batch.deletes_from,
        "writes": batch.writes,
        "settings": [f"{PREFIX}{kind}_{batch.name.upper()}" for kind in ("CRON", "CATCH_UP", "PACE")],
        "children": [_declared(child) for child in batch.children],
    }


def _declared(declared: Declared) -> dict[str, Any]:
    return {
        "name": declared.name,
        "sentence": declared.sentence,
        "queue": declared.queue,
        "budget": declared.budget.total_seconds(),
        "time_limit": declared.time_limit.total_seconds(),
        "records": [_record(record) for record in declared.records],
        "thresholds": {threshold.name: threshold.above for threshold in declared.thresholds},
    }


def _record(record: Record) -> dict[str, Any]:
    counted = {"examined": record.examined, "processed": record.processed, **record.errors}
    objective = record.objective and record.objective.total_seconds()
    return {"name": record.name, "objective": objective, "counted_by": {how: list(by) for how, by in counted.items()}}


def settings_page(described: Sequence[Described]) -> str:
    """Write docs/settings.md."""
    rows = (
        (f"`{one.name}`", one.type.replace("|", "or"), f"`{one.default}`" if one.default else "", one.sentence)
        for one in described
    )
    return SETTINGS + _markdown(("name", "type", "default", "what it is for"), rows)


def metrics_page(metrics: Mapping[str, Metric]) -> str:
    """Write docs/metrics.md."""
    written, found = METRICS, dict[str, dict[str, None]]()
    for process in PROCESSES:
        rows = [(f"`{one.name}`", one.type, _code(one.labels), one.unit, one.help) for one in of(process, metrics)]
        written += f"\n## `forgekeeper {process}`, at `{PREFIX}METRICS_PORT_{process.upper()}`\n\n"
        written += _markdown(("name", "type", "labels", "unit", "what it says"), rows)
    for one in metrics.values():
        for label, values in one.values.items():
            found.setdefault(label, {}).update(dict.fromkeys(values or ()))
    labels = ((f"`{label}`", _code(values) or "as configured") for label, values in found.items())
    return f"{written}\n## Labels\n\n{_markdown(('label', 'values'), labels)}"


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, *rows]
    written = [f"| {' | '.join(line)} |\n" for line in lines]
    return "".join([written[0], "|", "---|" * len(columns), "\n", *written[1:]])


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)
