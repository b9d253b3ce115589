"""`refs`: restore wrongly deleted git refs at the values in the audit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from shlex import join
from typing import Annotated, Any

import typer

from forgekeeper.api.batches import ChildSpec
from forgekeeper.cli.connection import connect_command
from forgekeeper.cli.terminal import FAILED_STATUS, Json, Problem, escape_unprintable, print_json, write_line, wrong_use
from forgekeeper.engine.ref_restoring import DeletedRef, find_deleted_refs, list_children_with_refs, restore_refs
from forgekeeper.platform.settings import Settings
from forgekeeper.targets.git_repository import RootUnavailable
from forgekeeper.targets.git_restore import REF_RESTORED, WOULD_BE_RESTORED, RestoreOutcome

refs = typer.Typer(name="refs", help="Restore git refs that were deleted by mistake.")


@refs.command("restore")
def refs_restore(
    which: Annotated[
        list[int] | None,
        typer.Argument(metavar="[ID]...", min=1, max=2**63 - 1, help="Ids of deletions, as `audit` shows them."),
    ] = None,
    run: Annotated[int | None, typer.Option(metavar="N", help="All refs that this run has deleted.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show which refs could be restored, and change nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Restore deleted refs, with the values that the audit recorded.

    This is possible while git still has their objects: until a `gc` prunes them, by default after two weeks.  A ref
    that exists again is left unchanged.  Exit status 0 only if every ref was restored.
    """
    if not which and run is None:
        wrong_use("name deletions by their ids, or use --run N")
    entries = list[dict[str, Any]]()
    with connect_command("refs") as settings:
        found = [(child, find_deleted_refs(child, which or (), run)) for child in list_children_with_refs()]
        _require_known(found, which or ())
        try:
            for one, outcome in _restore_each(found, settings, dry_run=dry_run):
                entries.append(one._asdict() | vars(outcome))
                if not json:
                    _write_outcome(one, outcome)
        except RootUnavailable as error:
            raise Problem(str(error)) from None
    done = sum(entry["state"] in (REF_RESTORED.state, WOULD_BE_RESTORED.state) for entry in entries)
    if json:
        print_json({"restored": 0 if dry_run else done, "dry_run": dry_run, "entries": entries})
    else:
        write_line(f"{done} of {len(entries)} {'could be' if dry_run else 'were'} restored")
    if done < len(entries):
        raise typer.Exit(FAILED_STATUS)


def _require_known(found: Sequence[tuple[ChildSpec, Sequence[DeletedRef]]], ids: Sequence[int]) -> None:
    """Raise `Problem` if an id is unknown, or is a deletion of several batches."""
    batches = Counter(number for _child, deleted in found for number in {one.id for one in deleted})
    if not batches or (unknown := {*ids} - batches.keys()):
        of = ", ".join(map(str, sorted(unknown))) if batches else "these ids or this run"
        raise Problem(f"the audit has no deleted ref for {of}; `forgekeeper audit` lists deletions")
    if several := [number for number in ids if batches[number] > 1]:
        raise Problem(f"several batches have deleted a ref for {several[0]}; name its run with --run")


def _restore_each(
    found: Sequence[tuple[ChildSpec, Sequence[DeletedRef]]], settings: Settings, *, dry_run: bool
) -> Iterator[tuple[DeletedRef, RestoreOutcome]]:
    """Restore the refs of each child; yield the outcome of each ref."""
    for child, deleted in found:
        if deleted:
            yield from restore_refs(child, deleted, settings, dry_run=dry_run)


def _write_outcome(one: DeletedRef, outcome: RestoreOutcome) -> None:
    """Write the outcome of a ref, without wrapping."""
    write_line(
        f"deletion {one.id}, project {one.project_id}, {escape_unprintable(one.ref)} at"
        f" {escape_unprintable(one.oid)}: {outcome.state}"
    )
    if outcome.reason:
        write_line(f"    {escape_unprintable(outcome.reason)}")
    if outcome.command:
        command = join(outcome.command)
        write_line(f"    {command if command.isprintable() else 'its name is not printable: --json shows the command'}")
