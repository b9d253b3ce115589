"""`objects`: restore wrongly deleted rows together with their objects.

Objects are kept, and rows are restored from the audit. There may be millions of rows: memory holds their ids and
one page of rows, and no transaction stays open between pages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import chain
from typing import Annotated, NamedTuple

import typer
from peewee import chunked

from forgekeeper.api.batches import BATCHES
from forgekeeper.audit import acts
from forgekeeper.audit.deletions import find_ids_at_work
from forgekeeper.cli.connection import connect_command
from forgekeeper.cli.terminal import (
    All,
    Json,
    Problem,
    create_group,
    out,
    print_answer,
    print_json,
    print_table,
    write_line,
    wrong_use,
)
from forgekeeper.engine.deleted_rows import (
    OUTBOX_OBJECT_RECORD,
    RestoreSelection,
    find_outbox_objects,
    list_restorable_kinds,
    read_deleted_pages,
    read_recoverable_pages,
)
from forgekeeper.engine.restoring import RestorableRows, RestoredRow
from forgekeeper.sources.outbox import DeletedObject

RESTORABLE_KINDS = list_restorable_kinds()
"""Restorable kinds of rows, each with the name of its batch."""
KIND_NAMES = " and ".join(f"{kind.called}s" for kind, _ in RESTORABLE_KINDS)
DELETED_WORD = (
    "deleted"
    if len({kind.past_participle for kind, _ in RESTORABLE_KINDS}) > 1
    else RESTORABLE_KINDS[0][0].past_participle
)
ProjectOption = Annotated[int | None, typer.Option(metavar="P", help=f"Only {KIND_NAMES} of this project.")]
RunOption = Annotated[
    int | None, typer.Option(metavar="N", help=f"Only {KIND_NAMES} that this run has {DELETED_WORD}.")
]
SELECTION_OPTIONS = ["--project P", "--run N", *(f"--{kind.called} ID" for kind, _ in RESTORABLE_KINDS)]
OBJECTS_PER_PAGE = 5_000
"""Objects that are held in one transaction."""


class HeldObjects(NamedTuple):
    """Number of *objects* that are held, and number of *rows* that can be restored.

    *lost* counts rows whose objects are deleted; *too_late* counts objects that a run may be deleting now.
    """

    objects: int
    rows: int
    lost: int
    too_late: int


def objects_held(
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="Maximum number of objects, oldest first.")] = 100,
    json: Json = False,
) -> None:
    """List the kept objects: no run deletes them until `unhold`."""
    with connect_command("objects"):
        total = DeletedObject.select_held().count()
        found = DeletedObject.select_held().limit(limit)
        held = [{name: getattr(row, name) for name in ("id", "path", "project_id", "created_at")} for row in found]
    if json:
        print_json({"held": total, "entries": held})
        return
    print_table(("id", "path", "project", "deleted"), (row.values() for row in held))
    out.print(f"{total} in all")


KEEP_HELP = f"""\
Keep objects of {KIND_NAMES} that were {DELETED_WORD} by mistake, and print the SQL that inserts the rows again.

This is possible until the objects are deleted, FORGEKEEPER_OBJECT_GRACE after the {KIND_NAMES}.  The rows are as the
audit has them.  No run deletes the kept objects until `unhold`.  Run the SQL with `psql -X -v ON_ERROR_STOP=1 -f FILE`.
The command is also called `hold`.
"""
OWNER_NAMES = " or ".join(("an " if kind.called[0] in "aeiou" else "a ") + kind.called for kind, _ in RESTORABLE_KINDS)
UNHOLD_HELP = (
    f"End what `keep` began: the objects are deleted FORGEKEEPER_OBJECT_GRACE later, unless {OWNER_NAMES} names them."
)


def _add_row_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add an option for each kind of row to a command, such as ``--artifact ID``."""
    signature = inspect.signature(command, eval_str=True)
    given = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            kind.called,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=None,
            annotation=Annotated[int | None, typer.Option(metavar="ID", help=f"Only this {kind.called}.")],
        )
        for kind, _ in RESTORABLE_KINDS
    ]
    command.__signature__ = signature.replace(parameters=[*given[:2], *options, *given[2:]])  # type: ignore[attr-defined]
    return command


def hold_objects(project: ProjectOption = None, run: RunOption = None, json: Json = False, **ids: int | None) -> None:
    """Keep the objects, and print the rows or the SQL."""
    which = _read_which(project, run, ids)
    if which is None or which.is_empty:
        wrong_use(f"use {', '.join(SELECTION_OPTIONS[:-1])} or {SELECTION_OPTIONS[-1]}")
    kinds = [kind for kind, _ in RESTORABLE_KINDS if which.includes_kind(kind)]
    with connect_command("objects") as settings:
        chosen, batch = _choose_objects(kinds, which), _find_batch()
        # The act is recorded before anything is held: an act that cannot be recorded does not happen.
        acts.record_act("objects hold", _describe_rows(which), batch=batch, after=acts.summarize_things(chosen))
        held = _hold_in_pages(kinds, which, chosen, settings.object_visibility, audited=settings.is_audited(batch))
        obstacle = next(filter(None, (kind.describe_obstacle() for kind in kinds)), None)
        script = _write_scripts(kinds, which) if held.rows and not obstacle else ()
        if json:
            counts = {"held": held.objects, "lost": held.lost, "too_late": held.too_late}
            rows = {f"{kind.called}s": list(_find_rows(kind, which)) for kind in kinds}
            print_json(counts | rows | {"statements": list(script), "obstacle": obstacle})
        else:
            for line in chain(_write_comments(which, held), script):
                write_line(line)
    if obstacle:
        raise Problem(obstacle)


def unhold_objects(
    project: ProjectOption = None, run: RunOption = None, everything: All = False, json: Json = False, **ids: int | None
) -> None:
    """Release the held objects."""
    which = _read_which(project, run, ids)
    if which is None or which.is_empty != everything:
        wrong_use(f"use {', '.join(SELECTION_OPTIONS)} or --all")
    kinds = [kind for kind, _ in RESTORABLE_KINDS if which.includes_kind(kind)]
    with connect_command("objects") as settings:
        held = _choose_objects(kinds, which, held=True)
        acts.record_act("objects unhold", _describe_rows(which), batch=_find_batch(), after={"let_go": len(held)})
        pages = chunked(held, OBJECTS_PER_PAGE)
        count = sum(DeletedObject.unhold(page, grace=settings.object_grace) for page in pages)
    print_answer({"let_go": count}, f"{count} objects are no longer kept", json=json)


objects = create_group(
    "objects", f"Keep the objects of deleted {KIND_NAMES}, to restore the {KIND_NAMES}.", objects_held, "held"
)
_add_row_options(hold_objects)
objects.command("keep", help=KEEP_HELP)(hold_objects)
# The earlier name, which scripts use.
objects.command("hold", help=KEEP_HELP, hidden=True)(hold_objects)
objects.command("unhold", help=UNHOLD_HELP)(_add_row_options(unhold_objects))
COMMANDS = {"objects": objects}


def _read_which(project: int | None, run: int | None, ids: Mapping[str, int | None]) -> RestoreSelection | None:
    """Return the rows that the options name; None if they name several things."""
    named = [(called, number) for called, number in ids.items() if number is not None]
    if len(named) + (project is not None) + (run is not None) > 1:
        return None
    called, row = named[0] if named else (None, None)
    return RestoreSelection(project, run, row, called)


def _describe_rows(which: RestoreSelection) -> str:
    """Name the rows as in the audit, such as ``project:7``."""
    named = {"project": which.project, "run": which.run, which.row_kind: which.row}
    return next((f"{name}:{number}" for name, number in named.items() if number is not None), "all")


def _find_batch() -> str:
    """Return the name of the batch that deletes the objects of the outbox."""
    return next(name for name, batch in BATCHES.items() if DeletedObject in batch.emptied_tables)


def _write_comments(which: RestoreSelection, held: HeldObjects) -> list[str]:
    """Return SQL comments with the counts and the steps before the rows are inserted."""
    stops = " and ".join(f"`forgekeeper stop {batch}`" for kind, batch in RESTORABLE_KINDS if which.includes_kind(kind))
    columns = " or ".join(kind.rows.since.column_name for kind, _ in RESTORABLE_KINDS if which.includes_kind(kind))
    option = _describe_rows(which).replace(":", " ")
    lines = [
        f"{held.objects} objects are kept until `forgekeeper objects unhold --{option}`",
        f"a run may be deleting {held.too_late} of them: repeat the command when the run has ended",
        f"{held.lost} more {DELETED_WORD} {KIND_NAMES} cannot be restored: their objects are no longer in the outbox",
        f"{held.rows} {KIND_NAMES} follow, still expired: the next run would delete them again",
        f"run {stops} before, and give them a later {columns}",
        "as the owner of the tables, all or nothing: `psql -X -v ON_ERROR_STOP=1 -f FILE`",
    ]
    return [f"-- {line}" for line in lines]


def _choose_objects(kinds: Sequence[RestorableRows], which: RestoreSelection, *, held: bool = False) -> list[int]:
    """Return the ids of the objects in the outbox, or only *held* ones; change nothing."""
    if which.run is None and which.row is None:
        of_project = () if which.project is None else (DeletedObject.project_id == which.project,)
        query = DeletedObject.select_held() if held else DeletedObject.select()
        return [row.id for row in query.select(DeletedObject.id).where(True, *of_project)]
    pages = ((kind, rows) for kind in kinds for rows in read_deleted_pages(kind, which))
    found = (one for kind, rows in pages for one in find_outbox_objects(kind, rows))
    return sorted({number for _, number, is_held in found if is_held or not held})


def _hold_in_pages(
    kinds: Sequence[RestorableRows],
    which: RestoreSelection,
    objects: Sequence[int],
    visibility: timedelta,
    *,
    audited: bool,
) -> HeldObjects:
    """Hold back *objects*, one page per transaction.

    Held objects stay held if a later page fails. A run that has claimed an object for *visibility* may be deleting it.
    If its batch is *audited*, the audit tells which objects are being deleted.
    """
    count = claimed = there = lost = 0
    for page in chunked(objects, OBJECTS_PER_PAGE):
        some, of_runs = DeletedObject.hold(page, visibility=visibility)
        count, claimed = count + some, claimed + of_runs
    # Read after the last page: a run that was faster has committed its intents by now.
    too_late = len(find_ids_at_work(OUTBOX_OBJECT_RECORD).intersection(objects))
    for kind in kinds:
        for rows, of_lost in read_recoverable_pages(kind, which):
            there, lost = there + len(rows), lost + of_lost
    return HeldObjects(count, there, lost, too_late if audited else max(too_late, claimed))


def _write_scripts(kinds: Sequence[RestorableRows], which: RestoreSelection) -> Iterator[str]:
    """Yield the SQL that inserts the rows of each kind."""
    for kind in kinds:
        yield from kind.write_script(_find_rows(kind, which))


def _find_rows(kind: RestorableRows, which: RestoreSelection) -> Iterator[RestoredRow]:
    """Yield the restorable rows as mappings of columns."""
    return (row for rows, _ in read_recoverable_pages(kind, which) for row in rows)
