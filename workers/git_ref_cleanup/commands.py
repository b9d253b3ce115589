"""Git ref deletions that were refused: `refs`."""

from __future__ import annotations

from typing import Annotated

import typer

from forgekeeper.audit import acts
from forgekeeper.cli.connection import connected
from forgekeeper.cli.console import All, Json, Problem, answer, emit, moment, out, table, wrong_use
from forgekeeper.database import database
from models import GitRefDeletion
from workers.git_ref_cleanup import deletions

refs = typer.Typer(help="Git ref deletions that were refused.")
COMMANDS = {"refs": refs}


@refs.callback(invoke_without_command=True)
def refs_default(context: typer.Context) -> None:
    """List the rejected deletions when no command is given."""
    if context.invoked_subcommand is None:
        refs_rejected()


@refs.command("rejected")
def refs_rejected(
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many, oldest first.")] = 100, json: Json = False
) -> None:
    """List the deletions that were refused, and why."""
    with connected("refs"):
        total = GitRefDeletion.rejected().count()
        rows = [
            (row.id, row.project_id, row.ref, row.expected_oid, row.reason, row.updated_at)
            for row in GitRefDeletion.rejected().limit(limit)
        ]
    fields = ("id", "project_id", "ref", "expected_oid", "reason", "updated_at")
    if json:
        emit({"rejected": total, "entries": [dict(zip(fields, row, strict=True)) for row in rows]})
        return
    table("", (*fields[:-1], "since"), ((*row[:-1], moment(row[-1])) for row in rows))
    out.print(f"{total} in all")


@refs.command("retry")
def refs_retry(
    number: Annotated[int | None, typer.Argument(metavar="[ID]", help="Its id, as `rejected` lists it.")] = None,
    everything: All = False,
    json: Json = False,
) -> None:
    """Try deletions that were refused anew, at the next run."""
    if (number is None) != everything:
        wrong_use("name one deletion by its id, or say --all")
    with connected("refs"), database.atomic():
        refused = None if number is None else GitRefDeletion.rejected().where(GitRefDeletion.id == number).first()
        retried = deletions.retry(None if number is None else [number])
        if retried:
            # The reason is what a new try erases.
            before = refused and {"project_id": refused.project_id, "ref": refused.ref, "reason": refused.reason}
            what = "all" if number is None else f"deletion {number}"
            acts.record("refs retry", what, batch="git_ref_cleanup", before=before, after={"retried": retried})
    if number is not None and not retried:
        raise Problem(f"{number} is not among the rejected deletions; `forgekeeper refs rejected` lists them")
    answer({"retried": retried}, f"{retried} will be tried anew", json=json)
