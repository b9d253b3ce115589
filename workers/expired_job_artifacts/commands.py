"""The way back for artifacts that were destroyed wrongly: `objects hold`.

Their objects are held back, and their rows come from the audit.  There may be millions: we have their ids, and a page
of their rows at a time; no transaction is open meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import chain
from typing import Annotated, NamedTuple

import typer
from peewee import chunked

from forgekeeper.audit import acts
from forgekeeper.audit.deletions import at_work
from forgekeeper.cli.connection import connected
from forgekeeper.cli.terminal import All, Json, Problem, answer, emit, group, out, table, write, wrong_use
from forgekeeper.sources.outbox import DeletedObject
from workers.expired_job_artifacts.destroyed import (
    OBJECT,
    Which,
    find_objects,
    pages_of_destroyed,
    pages_of_recoverable,
)
from workers.expired_job_artifacts.restoring import Row, describe_obstacle, write_script

Project = Annotated[int | None, typer.Option(metavar="P", help="Of the artifacts of this project.")]
Run = Annotated[int | None, typer.Option(metavar="N", help="Of the artifacts that this run has destroyed.")]
Artifact = Annotated[int | None, typer.Option(metavar="ID", help="Of this artifact.")]
BATCH = "delete_objects"
PAGE = 5_000
"""So many objects are held at once, in a transaction of their own."""


class Held(NamedTuple):
    """What holding has come to: how many *objects* are held, and the *artifacts* whose rows can come back.

    *lost* counts those whose objects are gone; *too_late* the objects that a run may be deleting just now.
    """

    objects: int
    artifacts: int
    lost: int
    too_late: int


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
    table(("id", "path", "project", "deleted"), (row.values() for row in held))
    out.print(f"{total} in all")


objects = group("objects", "Objects of deleted artifacts that must not be deleted.", objects_held, "held")
COMMANDS = {"objects": objects}


@objects.command("hold")
def objects_hold(project: Project = None, run: Run = None, artifact: Artifact = None, json: Json = False) -> None:
    """Hold back objects of artifacts that were destroyed wrongly, and print the SQL that inserts the rows back.

    That is possible until the objects go: FORGEKEEPER_OBJECT_GRACE after the artifacts.  The rows are as the audit
    has them.  No run deletes what is held, until `unhold`.  The SQL is for `psql -X -v ON_ERROR_STOP=1 -f FILE`.
    """
    which = Which(project, run, artifact)
    if which.named != 1:
        wrong_use("say --project P, --run N or --artifact ID")
    with connected("objects") as settings:
        chosen = _chosen(which)
        # Before anything is held: what cannot be recorded does not happen.
        acts.record("objects hold", _what(which), batch=BATCH, after=acts.some(chosen))
        audited = settings.audits(BATCH)
        held = _hold(which, chosen, settings.object_visibility, audited=audited)
        obstacle = describe_obstacle()
        script = write_script(_artifacts(which)) if held.artifacts and not obstacle else ()
        if json:
            counts = {"held": held.objects, "lost": held.lost, "too_late": held.too_late}
            emit(counts | {"artifacts": list(_artifacts(which)), "statements": list(script), "obstacle": obstacle})
        else:
            for line in chain(_comments(which, held), script):
                write(line)
    if obstacle:
        raise Problem(obstacle)


@objects.command("unhold")
def objects_unhold(
    project: Project = None,
    run: Run = None,
    artifact: Artifact = None,
    everything: All = False,
    json: Json = False,
) -> None:
    """Let go what `hold` has held back: it is deleted FORGEKEEPER_OBJECT_GRACE later, unless an artifact names it."""
    which = Which(project, run, artifact)
    if which.named + everything != 1:
        wrong_use("say --project P, --run N, --artifact ID or --all")
    with connected("objects") as settings:
        held = _chosen(which, held=True)
        acts.record("objects unhold", _what(which), batch=BATCH, after={"let_go": len(held)})
        count = sum(DeletedObject.unhold(page, grace=settings.object_grace) for page in chunked(held, PAGE))
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


def _chosen(which: Which, *, held: bool = False) -> list[int]:
    """Return the ids of their objects in the outbox, or of those that are *held* alone; nothing is changed."""
    if which.run is None and which.artifact is None:
        of_project = () if which.project is None else (DeletedObject.project_id == which.project,)
        query = DeletedObject.held() if held else DeletedObject.select()
        return [row.id for row in query.select(DeletedObject.id).where(True, *of_project)]
    found = (one for rows in pages_of_destroyed(which) for one in find_objects(rows))
    return sorted({number for _, number, is_held in found if is_held or not held})


def _hold(which: Which, objects: Sequence[int], visibility: timedelta, *, audited: bool) -> Held:
    """Hold back *objects*, each page in a transaction of its own: what is held stays held, whatever comes after.

    A run that has claimed one for *visibility* may be at it.  Where that is *audited* it is known which it is at.
    """
    count = claimed = there = lost = 0
    for page in chunked(objects, PAGE):
        some, of_runs = DeletedObject.hold(page, visibility=visibility)
        count, claimed = count + some, claimed + of_runs
    # Asked after the last was held: who was before us has committed what it is about to delete.
    too_late = len(at_work(OBJECT).intersection(objects))
    for rows, of_lost in pages_of_recoverable(which):
        there, lost = there + len(rows), lost + of_lost
    return Held(count, there, lost, too_late if audited else max(too_late, claimed))


def _artifacts(which: Which) -> Iterator[Row]:
    """Yield the artifacts that can come back, by their columns."""
    return (row for rows, _ in pages_of_recoverable(which) for row in rows)
