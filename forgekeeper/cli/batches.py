"""`batches`: what each batch has declared, and the page of documentation about it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from forgekeeper.batches import BATCHES, BatchSpec, Declared, Record
from forgekeeper.boot import load
from forgekeeper.cli.connection import batch_named
from forgekeeper.cli.console import Json, emit, markdown_table, out
from forgekeeper.settings import PREFIX, Settings

INTRODUCTION = """# Batches

What each batch has declared. All else is derived from that: its actor, its settings, what is counted, what `status`
and the dashboards show. Times are in seconds.

This page is printed by `forgekeeper batches --markdown`.
"""


def batches(
    batch: Annotated[str | None, typer.Argument(help="Only this one.", show_default=False)] = None,
    json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/batches.md.")] = False,
) -> None:
    """List what every batch has declared: document, schedule, limits, records, thresholds, settings, failpoints."""
    settings, chosen = load(), [batch_named(batch)] if batch else list(BATCHES.values())
    found = [described(one, settings) for one in chosen]
    if json:
        emit({"batches": {one["name"]: one for one in found}})
    elif markdown:
        out.print(page(found), end="")
    else:
        for one in found:
            out.print(f"{one['name']}  ({one['schedule']}, queue {one['queue']})", style="bold")
            out.print(f"    {one['sentence']}")


def described(batch: BatchSpec, settings: Settings) -> dict[str, Any]:
    """Return what `batches --json` shows of a batch; times in seconds."""
    return _facts(batch) | {
        "document": batch.document,
        "module": batch.module,
        "team": batch.team,
        "schedule": str(settings.cron(batch.name) or "off"),
        "flag": batch.flag,
        "tables": [table._meta.table_name for table in batch.tables],
        "deletes_from": batch.deletes_from,
        "writes": batch.writes,
        "settings": [f"{PREFIX}{kind}_{batch.name.upper()}" for kind in ("CRON", "CATCH_UP", "PACE")],
        "children": [_facts(child) for child in batch.children],
    }


def _facts(declared: Declared) -> dict[str, Any]:
    return {
        "name": declared.name,
        "sentence": declared.sentence,
        "queue": declared.queue,
        "budget": declared.budget.total_seconds(),
        "time_limit": declared.time_limit.total_seconds(),
        "records": [_record(record) for record in declared.records],
        "thresholds": {threshold.name: threshold.above for threshold in declared.thresholds},
        "failpoints": list(declared.steps),
    }


def _record(record: Record) -> dict[str, Any]:
    counted = {"examined": record.examined, "processed": record.processed, **record.errors}
    objective = record.objective and record.objective.total_seconds()
    return {"name": record.name, "objective": objective, "counted_by": {how: list(by) for how, by in counted.items()}}


def page(found: Iterable[dict[str, Any]]) -> str:
    """Write the documentation's page of batches."""
    return INTRODUCTION + "".join(map(_section, found))


def _section(one: dict[str, Any]) -> str:
    facts = {
        "document": one["document"],
        "declared in": f"`{one['module']}`",
        "schedule": f"`{one['schedule']}`",
        "flag": one["flag"] and f"`{one['flag']}`",
        "alerts go to": one["team"],
        "writes by itself": one["writes"],
        "tables": _code(one["tables"]),
        "settings": _code(one["settings"]),
    }
    table = markdown_table(("", ""), ((name, fact) for name, fact in facts.items() if fact))
    parts = "".join(_part(part) for part in (one, *one["children"]))
    return f"\n## {one['name']}\n\n{one['sentence']}\n\n{table}{parts}"


def _part(part: dict[str, Any]) -> str:
    limits = f"`{part['name']}` goes through the queue `{part['queue']}`, "
    limits += f"stops after {part['budget']:g} s and is killed after {part['time_limit']:g} s."
    if part["thresholds"]:
        crossed = (f"{name} {above:g}" if above else name for name, above in part["thresholds"].items())
        limits += f" Thresholds: {', '.join(crossed)}."
    if part["failpoints"]:
        limits += f" Failpoints: {_code(part['failpoints'])}."
    rows = [_row(record) for record in part["records"]]
    table = f"\n{markdown_table(('record', 'counted by', 'may wait'), rows)}" if rows else ""
    return f"\n{limits}\n{table}"


def _row(record: dict[str, Any]) -> tuple[str, str, str]:
    counted = "; ".join(f"{how}: {' + '.join(fields)}" for how, fields in record["counted_by"].items() if fields)
    return f"`{record['name']}`", counted, "" if record["objective"] is None else f"{record['objective']:g}"


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)
