"""Git refs that were deleted wrongly: `refs` restores them, at what the audit says that they were (batch 58)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from shlex import join
from typing import Annotated, Any, NamedTuple

import typer

from forgekeeper.audit import acts
from forgekeeper.audit.deletions import each_of
from forgekeeper.cli.connection import connected
from forgekeeper.cli.terminal import FAILED, Json, Problem, emit, visible, write, wrong_use
from forgekeeper.database import database
from forgekeeper.settings import Settings
from forgekeeper.storage import git_restore
from forgekeeper.storage.git_command import GitError
from forgekeeper.storage.git_repository import RootUnavailable
from forgekeeper.storage.git_restore import POSSIBLE, RESTORED, Restored
from workers.git_ref_cleanup import NAME, RECORD, repositories

TIMEOUT = 300.0
"""Seconds that git may take for one repository."""
PROJECT_MISSING = Restored("refused", "its project has gone")

# The latest first: an id may have been given out again.
DELETED = """
    select at, run, ids, detail from audit_deletions
    where record = %(record)s and phase = 'outcome'
      and (ids && %(ids)s::bigint[] or run = %(run)s)
    order by id desc
"""

refs = typer.Typer(help="Git refs that were deleted wrongly.")
COMMANDS = {"refs": refs}


class Deleted(NamedTuple):
    """A ref that was deleted: by which run and when, for which row, and what it was."""

    id: int
    at: datetime
    run: int | None
    project_id: int
    ref: str
    oid: str


@refs.command("restore")
def refs_restore(
    which: Annotated[
        list[int] | None,
        typer.Argument(metavar="[ID]...", min=1, max=2**63 - 1, help="Deletions, by the ids that `audit` shows."),
    ] = None,
    run: Annotated[int | None, typer.Option(metavar="N", help="All refs that the run has deleted.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what could be restored, and make nothing.")] = False,
    json: Json = False,
) -> None:
    """Restore deleted refs, at what the audit says that they were.

    That is possible while git still has their objects: until its next `gc` that prunes them, by default two weeks.
    A ref that is there again is left as it is.  Exit status 0 only if every one was restored.
    """
    if not which and run is None:
        wrong_use("name deletions by their ids, or say --run N")
    entries = list[dict[str, Any]]()
    with connected("refs") as settings:
        found = _deleted(which or (), run)
        if not found or (unknown := {*(which or ())} - {one.id for one in found}):
            of = ", ".join(map(str, sorted(unknown))) if found else "that"
            raise Problem(f"the audit knows of no ref that was deleted for {of}; `forgekeeper audit` shows which")
        try:
            for one, became in _restored(found, settings, dry_run=dry_run):
                entries.append(one._asdict() | vars(became))
                if not json:
                    _say(one, became)
        except RootUnavailable as error:
            raise Problem(str(error)) from None
    done = sum(entry["state"] in (RESTORED.state, POSSIBLE.state) for entry in entries)
    if json:
        emit({"restored": 0 if dry_run else done, "dry_run": dry_run, "entries": entries})
    else:
        write(f"{done} of {len(entries)} {'could be' if dry_run else 'were'} restored")
    if done < len(entries):
        raise typer.Exit(FAILED)


def _deleted(ids: Sequence[int], run: int | None) -> list[Deleted]:
    """Return what the audit knows to be deleted for these rows, or by that run: of each ref the latest deletion."""
    rows = database.execute_sql(DELETED, {"record": RECORD, "ids": list(ids), "run": run}).fetchall()
    found: dict[tuple[int, str], Deleted] = {}
    for at, by, numbers, detail in rows:
        for facts in each_of(numbers, detail, len(numbers)):
            chosen = facts["id"] in ids or (run is not None and by == run)
            if chosen and facts["state"] == "deleted":
                one = Deleted(facts["id"], at, by, facts["project_id"], facts["ref"], facts["oid"])
                found.setdefault((one.project_id, one.ref), one)
    return sorted(found.values())


def _restored(found: Sequence[Deleted], settings: Settings, *, dry_run: bool) -> Iterator[tuple[Deleted, Restored]]:
    """Restore the refs, a project at a time; yield what became of each.

    The act is recorded before git is asked; where it cannot be, nothing is restored.  Raises `RootUnavailable`.
    """
    root, projects = repositories.require_root(settings), sorted({one.project_id for one in found})
    paths = repositories.paths(projects)
    for project in projects:
        refs = {one.ref: one for one in found if one.project_id == project}
        wanted, until = {ref: one.oid for ref, one in refs.items()}, time.monotonic() + TIMEOUT

        def record(refs: Mapping[str, str], project: int = project) -> None:
            acts.record("refs restore", f"project:{project}", batch=NAME, after={"refs": dict(refs)})

        became = dict.fromkeys(refs, PROJECT_MISSING)
        try:
            if project in paths:
                became = git_restore.restore(root, paths[project], wanted, until=until, dry_run=dry_run, before=record)
        except RootUnavailable:
            raise
        except GitError as error:
            became = dict.fromkeys(refs, Restored("refused", str(error)))
        yield from ((one, became[ref]) for ref, one in refs.items())


def _say(one: Deleted, became: Restored) -> None:
    """Say what became of a ref, in lines that no terminal cuts."""
    write(f"deletion {one.id}, project {one.project_id}, {visible(one.ref)} at {visible(one.oid)}: {became.state}")
    if became.reason:
        write(f"    {visible(became.reason)}")
    if became.command:
        command = join(became.command)
        write(f"    {command if command.isprintable() else 'its name cannot be printed: --json has the command'}")
