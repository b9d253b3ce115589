"""Objects of the outbox that were given up, or are held back: `objects`."""

from __future__ import annotations

from typing import Annotated

import typer

from forgekeeper.audit import acts
from forgekeeper.cli.connection import connected
from forgekeeper.cli.console import All, Json, Problem, answer, emit, moment, out, table, wrong_use
from forgekeeper.database import database
from forgekeeper.storage.outbox import DeletedObject

objects = typer.Typer(help="Objects of deleted artifacts that could not be deleted, or must not be.")
COMMANDS = {"objects": objects}


@objects.callback(invoke_without_command=True)
def objects_default(context: typer.Context, json: Json = False) -> None:
    """List the dead objects when no command is given."""
    if context.invoked_subcommand is None:
        objects_failed(json=json)


@objects.command("failed")
def objects_failed(
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many, oldest first.")] = 100, json: Json = False
) -> None:
    """List the objects that were given up."""
    with connected("objects"):
        total = DeletedObject.dead().count()
        dead = [(row.id, row.path, row.attempts, row.created_at) for row in DeletedObject.dead().limit(limit)]
        held = DeletedObject.held().count()
    if json:
        fields = ("id", "path", "attempts", "created_at")
        emit({"failed": total, "entries": [dict(zip(fields, row, strict=True)) for row in dead]})
        return
    table("", ("id", "path", "attempts", "since"), ((*row[:3], moment(row[3])) for row in dead))
    if held:
        out.print(f"{held} are held back: `forgekeeper objects held` lists them")
    out.print(f"{total} in all")


@objects.command("held")
def objects_held(
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many, oldest first.")] = 100, json: Json = False
) -> None:
    """List the objects that are held back: no run deletes them until `unhold`."""
    with connected("objects"):
        total = DeletedObject.held().count()
        held = [(row.id, row.path, row.project_id, row.created_at) for row in DeletedObject.held().limit(limit)]
    if json:
        fields = ("id", "path", "project_id", "created_at")
        emit({"held": total, "entries": [dict(zip(fields, row, strict=True)) for row in held]})
        return
    table("", ("id", "path", "project", "deleted"), ((*row[:3], moment(row[3])) for row in held))
    out.print(f"{total} in all")


@objects.command("retry")
def objects_retry(
    number: Annotated[int | None, typer.Argument(metavar="[ID]", help="Its id, as `failed` lists it.")] = None,
    everything: All = False,
    json: Json = False,
) -> None:
    """Try objects that were given up anew, at the next run."""
    if (number is None) != everything:
        wrong_use("name one object by its id, or say --all")
    with connected("objects"), database.atomic():
        retried = DeletedObject.retry(None if number is None else [number])
        if retried:
            acts.record("objects retry", "all" if number is None else f"object {number}", after={"retried": retried})
    if number is not None and not retried:
        raise Problem(f"{number} is not among the dead objects; `forgekeeper objects failed` lists them")
    answer({"retried": retried}, f"{retried} will be tried anew", json=json)
