"""Bad records, which batches pass over: `records`."""

from __future__ import annotations

from typing import Annotated

import typer

from forgekeeper.audit import acts
from forgekeeper.cli.connection import connected
from forgekeeper.cli.console import All, Json, Problem, emit, moment, out, table, wrong_use
from forgekeeper.database import database
from forgekeeper.runs.passed_over import PassedOver

records = typer.Typer(help="Bad records: each failed alone, is passed over for a growing while, and stops no other.")


@records.callback(invoke_without_command=True)
def records_default(context: typer.Context, json: Json = False) -> None:
    """List the bad records when no command is given."""
    if context.invoked_subcommand is None:
        records_list(json=json)


@records.command("list")
def records_list(
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many, oldest first.")] = 100, json: Json = False
) -> None:
    """List the records that failed, how often, why, and when they are tried again."""
    with connected("records"):
        total = PassedOver.select().count()
        rows = [
            (row.batch, row.record, row.key, row.failures, row.first_failed_at, row.retry_at, row.error)
            for row in PassedOver.oldest_first().limit(limit)
        ]
    fields = ("batch", "record", "key", "failures", "first_failed_at", "retry_at", "error")
    if json:
        emit({"passed_over": total, "entries": [dict(zip(fields, row, strict=True)) for row in rows]})
        return
    columns = (*fields[:4], "since", "tried again", "error")
    table("", columns, ((*row[:4], moment(row[4]), moment(row[5]), row[6]) for row in rows))
    out.print(f"{total} in all")


@records.command("retry")
def records_retry(
    key: Annotated[str | None, typer.Argument(metavar="[KEY]", help="Its key, as `list` shows it.")] = None,
    everything: All = False,
    batch: Annotated[str | None, typer.Option(metavar="BATCH", help="Only those of this batch.")] = None,
    json: Json = False,
) -> None:
    """Try bad records again, at the next run."""
    if (key is None) != everything:
        wrong_use("name one record by its key, or say --all")
    with connected("records"), database.atomic():
        retried = PassedOver.retry(key, batch=batch)
        if retried:
            acts.record("records retry", key or "all", batch=batch, after={"retried": retried})
    if key is not None and not retried:
        raise Problem(f"{key} is not among the bad records; `forgekeeper records` lists them")
    if json:
        emit({"retried": retried})
        return
    out.print(f"{retried} will be tried again")
