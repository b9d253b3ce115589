"""What is declared: `settings`, `metrics` and `batches`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from forgekeeper.batches import BATCHES, BatchSpec, Declared, all_declared
from forgekeeper.boot import load
from forgekeeper.cli.connection import batch_named
from forgekeeper.cli.console import Json, emit, out
from forgekeeper.settings import PREFIX, Settings
from forgekeeper.settings.reading import describe
from metrics.catalogue import table

FROM = {"environment": ", from the environment", ".env": ", from the file .env"}


def settings(json: Json = False) -> None:
    """List every setting with its type, default, present value, where that comes from, and sentence.

    Settings are environment variables, or lines of a file `.env` where the command runs.
    """
    described = describe(load())
    if json:
        emit([asdict(one) for one in described])
    else:
        for one in described:
            default = f", default {one.default}" if one.default else ""
            _show(f"{one.name}={one.value}  ({one.type}{default}{FROM.get(one.source, '')})", one.sentence)


def metrics(json: Json = False) -> None:
    """List every metric with its type, labels, unit and sentence."""
    known = table(all_declared())
    if json:
        facts = [asdict(one) | {"labels": one.values, "type": one.type, "unit": one.unit} for one in known.values()]
        emit({"metrics": facts})
    else:
        for one in known.values():
            labels = f"{{{', '.join(one.labels)}}}" if one.labels else ""
            _show(f"{one.name}{labels}  ({one.type}, {one.process})", one.help)


def batches(
    batch: Annotated[str | None, typer.Argument(help="Only this one.", show_default=False)] = None,
    json: Json = False,
) -> None:
    """List the batches; with --json what they have declared, times in seconds."""
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
        "records": [record.name for record in declared.records],
        "thresholds": {threshold.name: threshold.above for threshold in declared.thresholds},
    }
