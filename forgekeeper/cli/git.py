"""Git ref deletions that were refused (`refs`), and who works on what alone (`leases`)."""

from __future__ import annotations

from typing import Annotated, Any

import structlog
import typer

from forgekeeper import locks
from forgekeeper.cli.connection import connected, require_redis
from forgekeeper.cli.console import Json, Problem, answer, emit, moment, out, table, wrong_use
from forgekeeper.cli.objects import All
from forgekeeper.connections import client
from forgekeeper.runs.attempt import identity
from models import GitRefDeletion
from workers.git_ref_cleanup import deletions

refs = typer.Typer(help="Git ref deletions that were refused.")
leases = typer.Typer(help="Who works on what alone, and since when.")

log = structlog.get_logger(__name__)


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
    with connected("refs"):
        retried = deletions.retry(None if number is None else [number])
    if number is not None and not retried:
        raise Problem(f"{number} is not among the rejected deletions; `forgekeeper refs rejected` lists them")
    answer({"retried": retried}, f"{retried} will be tried anew", json=json)


@leases.callback(invoke_without_command=True)
def leases_default(context: typer.Context) -> None:
    """List the leases when no command is given."""
    if context.invoked_subcommand is None:
        leases_list()


@leases.command("list")
def leases_list(json: Json = False) -> None:
    """List the leases that are held, the one held for longest first."""
    with connected("leases"):
        require_redis()
        found = held()
    if json:
        emit({"leases": found})
        return
    columns = ("lease", "holder", "since", "seconds left")
    table("", columns, ((one["name"], one["holder"], moment(one["since"]), one["left"]) for one in found))


@leases.command("break")
def leases_break(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `leases list` shows it.")], json: Json = False
) -> None:
    """Free a lease whose holder hangs.  The holder is not stopped: it learns of it at its next safe point."""
    with connected("leases"):
        require_redis()
        broken = locks.break_lease(client, name)
    if not broken:
        raise Problem(f"nobody holds the lease {name}; `forgekeeper leases list` shows those that are held")
    log.warning("lease broken", lease=name, by=identity())
    answer({"lease": name, "broken": True}, f"{name} is free", json=json)


def held() -> list[dict[str, Any]]:
    """Return the leases that are held as facts: name, holder, since, and the seconds left unless renewed."""
    return [one._asdict() | {"left": round(one.left.total_seconds(), 1)} for one in locks.leases(client)]
