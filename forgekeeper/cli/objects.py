"""Objects of the outbox that are held back: `objects`."""

from __future__ import annotations

from typing import Annotated

import typer

from forgekeeper.cli.connection import connected
from forgekeeper.cli.console import Json, emit, moment, out, table
from forgekeeper.storage.outbox import DeletedObject

objects = typer.Typer(help="Objects of deleted artifacts that must not be deleted.")
COMMANDS = {"objects": objects}


@objects.callback(invoke_without_command=True)
def objects_default(context: typer.Context, json: Json = False) -> None:
    """List the objects that are held back when no command is given."""
    if context.invoked_subcommand is None:
        objects_held(json=json)


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
