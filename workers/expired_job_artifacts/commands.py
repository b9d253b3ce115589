"""Who has which bucket: `buckets`; and the way back for artifacts that were destroyed wrongly: `objects hold`."""

from __future__ import annotations

from itertools import chain
from typing import Annotated

import typer

from forgekeeper.audit import acts
from forgekeeper.cli.connection import connected
from forgekeeper.cli.console import All, Json, answer, emit, group, moment, out, table, write, wrong_use
from forgekeeper.connections import client
from forgekeeper.storage.outbox import DeletedObject
from workers.expired_job_artifacts import holding
from workers.expired_job_artifacts.buckets import states
from workers.expired_job_artifacts.holding import Held, Which, artifacts, statements

Project = Annotated[int | None, typer.Option(metavar="P", help="Of the artifacts of this project.")]
Run = Annotated[int | None, typer.Option(metavar="N", help="Of the artifacts that this run has destroyed.")]
BATCH = "delete_objects"


def buckets(json: Json = False) -> None:
    """Show the artifact buckets: which are free, and who has the others since when."""
    with connected("buckets"):
        found = states(client)
    if json:
        emit(found)
        return
    rows = [(one["number"], moment(one["since"]), one["token"] or "unknown") for one in found["occupied"]]
    table("", ("bucket", "last heartbeat", "owner"), sorted([*rows, *((free, "", "") for free in found["available"])]))


def objects_held(
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many, oldest first.")] = 100, json: Json = False
) -> None:
    """List the objects that are held back: no run deletes them until `unhold`."""
    with connected("objects"):
        total = DeletedObject.held().count()
        found = DeletedObject.held().limit(limit)
        held = [{name: getattr(row, name) for name in ("id", "path", "project_id", "created_at")} for row in found]
    if json:
        emit({"held": total, "entries": held})
        return
    table("", ("id", "path", "project", "deleted"), (row.values() for row in held))
    out.print(f"{total} in all")


objects = group("objects", "Objects of deleted artifacts that must not be deleted.", objects_held, "held")
COMMANDS = {"buckets": buckets, "objects": objects}


@objects.command("hold")
def objects_hold(project: Project = None, run: Run = None, json: Json = False) -> None:
    """Hold back objects of artifacts that were destroyed wrongly, and print the SQL that inserts the rows back.

    That is possible until the objects go: FORGEKEEPER_OBJECT_GRACE after the artifacts.  The rows are as the audit
    has them.  No run deletes what is held, until `unhold`.  The SQL is for `psql -X -v ON_ERROR_STOP=1 -f FILE`.
    """
    if (project is None) == (run is None):
        wrong_use("say --project P or --run N")
    which = Which(project, run)
    with connected("objects") as settings:
        chosen = holding.chosen(which)
        # Before anything is held: what cannot be recorded does not happen.
        acts.record("objects hold", _what(which), batch=BATCH, after=acts.some(chosen))
        audited = settings.audits(BATCH)
        held = holding.hold(which, chosen, settings.object_visibility, audited=audited)
        script = statements(artifacts(which))
        if json:
            counts = {"held": held.objects, "lost": held.lost, "too_late": held.too_late}
            emit(counts | {"artifacts": list(artifacts(which)), "statements": list(script)})
            return
        for line in chain(_comments(which, held), script if held.artifacts else ()):
            write(line)


@objects.command("unhold")
def objects_unhold(project: Project = None, run: Run = None, everything: All = False, json: Json = False) -> None:
    """Let go what `hold` has held back: it is deleted FORGEKEEPER_OBJECT_GRACE later, unless an artifact names it."""
    if [project is not None, run is not None, everything].count(True) != 1:
        wrong_use("say --project P, --run N or --all")
    which = Which(project, run)
    with connected("objects") as settings:
        held = holding.chosen(which, held=True)
        acts.record("objects unhold", _what(which), batch=BATCH, after={"let_go": len(held)})
        count = holding.unhold(held, settings.object_grace)
    answer({"let_go": count}, f"{count} are held back no longer", json=json)


def _what(which: Which) -> str:
    return next((f"{name}:{number}" for name, number in which._asdict().items() if number is not None), "all")


def _comments(which: Which, held: Held) -> list[str]:
    """Say in SQL's comments what was held, and what to think of before the rows go back."""
    lines = [
        f"{held.objects} objects are held back until `forgekeeper objects unhold --{_what(which).replace(':', ' ')}`",
        f"{held.too_late} of them a run may be deleting: ask again when it has ended, they may be lost",
        f"{held.lost} more artifacts were destroyed whose objects are gone, or not in the outbox any more",
        f"{held.artifacts} artifacts as they were: expired, so that the next run destroys them again",
        "`forgekeeper stop expired_job_artifacts` before, and give them another expire_at",
        "all or nothing: `psql -X -v ON_ERROR_STOP=1 -f FILE`, as who owns the tables",
    ]
    return [f"-- {line}" for line in lines]
