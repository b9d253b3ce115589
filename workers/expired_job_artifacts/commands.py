"""Who has which bucket: `buckets`; and the way back for artifacts that were destroyed wrongly: `objects hold`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from forgekeeper.audit import acts
from forgekeeper.cli.connection import connected
from forgekeeper.cli.console import All, Json, answer, emit, moment, out, table, wrong_use
from forgekeeper.cli.objects import objects
from forgekeeper.database import database
from workers.expired_job_artifacts import bucket_states, holding
from workers.expired_job_artifacts.holding import Held

Project = Annotated[int | None, typer.Option(metavar="P", help="Of the artifacts of this project.")]
Run = Annotated[int | None, typer.Option(metavar="N", help="Of the artifacts that this run has destroyed.")]
BATCH = "delete_objects"


def buckets(json: Json = False) -> None:
    """Show the artifact buckets: which are free, and who has the others since when."""
    with connected("buckets"):
        found = bucket_states()
    if json:
        emit(found)
        return
    rows = [(number, "available", "", "") for number in found["available"]]
    rows += [(one["number"], "occupied", moment(one["since"]), one["token"] or "unknown") for one in found["occupied"]]
    table("", ("bucket", "state", "last sign of life", "owner"), sorted(rows))


COMMANDS = {"buckets": buckets}


@objects.command("hold")
def objects_hold(project: Project = None, run: Run = None, json: Json = False) -> None:
    """Hold back objects of artifacts that were destroyed wrongly, and print the SQL that inserts the rows back.

    That is possible until the objects go: FORGEKEEPER_OBJECT_GRACE after the artifacts.  The rows are as the audit
    has them.  No run deletes what is held, until `unhold`.
    """
    if (project is None) == (run is None):
        wrong_use("say --project P or --run N")
    with connected("objects"):
        with database.atomic():
            held = holding.hold(project=project, run=run)
            acts.record(
                "objects hold", _what(project, run), batch=BATCH, after={"held": len(held.objects), **_ids(held)}
            )
        statements = list(holding.statements(held.artifacts))
    if json:
        counts = {"held": len(held.objects), "lost": held.lost, "too_late": held.too_late}
        emit({**counts, "artifacts": held.artifacts, "statements": statements})
        return
    for line in [*_comments(held, project, run), "begin;", *statements, "commit;"]:
        for part in line.splitlines():
            out.print(part)


@objects.command("unhold")
def objects_unhold(project: Project = None, run: Run = None, everything: All = False, json: Json = False) -> None:
    """Let go what `hold` has held back: it is deleted FORGEKEEPER_OBJECT_GRACE later, unless an artifact names it."""
    if [project is not None, run is not None, everything].count(True) != 1:
        wrong_use("say --project P, --run N or --all")
    with connected("objects") as settings, database.atomic():
        count = holding.unhold(settings.object_grace, project=project, run=run)
        acts.record("objects unhold", _what(project, run), batch=BATCH, after={"let_go": count})
    answer({"let_go": count}, f"{count} are held back no longer", json=json)


def _what(project: int | None, run: int | None) -> str:
    if run is not None:
        return f"run:{run}"
    return "all" if project is None else f"project:{project}"


def _ids(held: Held) -> dict[str, Any]:
    """Return the ids of the objects, unless they are too many for an act."""
    return {"objects": list(held.objects)} if len(held.objects) <= 10_000 else {}


def _comments(held: Held, project: int | None, run: int | None) -> list[str]:
    """Say in SQL's comments what was held, and what to think of before the rows go back."""
    option = f"--run {run}" if run is not None else f"--project {project}"
    said = [f"{len(held.objects)} objects are held back until `forgekeeper objects unhold {option}`"]
    if held.too_late:
        said.append(f"{held.too_late} of them a run is at just now: ask again, they may be lost")
    if held.lost:
        said.append(f"{held.lost} more artifacts were destroyed whose objects are not in the outbox any more")
    if held.artifacts:
        said.append(f"{len(held.artifacts)} artifacts as they were: expired, so that the next run destroys them again")
        said.append("`forgekeeper stop expired_job_artifacts` before, and give them another expire_at")
    else:
        said.append("the audit knows of no artifacts that belong to them: there is nothing to insert")
    return [f"-- {line}" for line in said]
