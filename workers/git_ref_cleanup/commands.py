"""Git refs that were deleted wrongly: `refs` restores them, at what the audit says that they were (batch 58)."""

from __future__ import annotations

from shlex import join
from typing import Annotated, Any

import typer

from forgekeeper.cli.connection import connected
from forgekeeper.cli.terminal import FAILED, Json, Problem, emit, visible, write, wrong_use
from forgekeeper.targets.git_repository import RootUnavailable
from forgekeeper.targets.git_restore import POSSIBLE, RESTORED, Restored
from workers.git_ref_cleanup.restoring import DeletedRef, find_deleted, restore

refs = typer.Typer(help="Git refs that were deleted wrongly.")
COMMANDS = {"refs": refs}


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
        found = find_deleted(which or (), run)
        if not found or (unknown := {*(which or ())} - {one.id for one in found}):
            of = ", ".join(map(str, sorted(unknown))) if found else "that"
            raise Problem(f"the audit knows of no ref that was deleted for {of}; `forgekeeper audit` shows which")
        try:
            for one, became in restore(found, settings, dry_run=dry_run):
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


def _say(one: DeletedRef, became: Restored) -> None:
    """Say what became of a ref, in lines that no terminal cuts."""
    write(f"deletion {one.id}, project {one.project_id}, {visible(one.ref)} at {visible(one.oid)}: {became.state}")
    if became.reason:
        write(f"    {visible(became.reason)}")
    if became.command:
        command = join(became.command)
        write(f"    {command if command.isprintable() else 'its name cannot be printed: --json has the command'}")
