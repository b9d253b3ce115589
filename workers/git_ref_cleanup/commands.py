"""Git refs that were deleted wrongly: `refs`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from shlex import quote
from typing import Annotated

import typer
from peewee import PeeweeException

from forgekeeper.cli.connection import connected
from forgekeeper.cli.console import (
    FAILED,
    Json,
    Problem,
    emit,
    visible,
    write,
    wrong_use,
)
from forgekeeper.storage.git_repository import RootUnavailable
from forgekeeper.storage.git_restore import POSSIBLE, RESTORED, Restored
from metrics.redaction import printable
from workers.git_ref_cleanup import restoring
from workers.git_ref_cleanup.restoring import Deleted

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
    with connected("refs") as settings:
        found = restoring.deleted(which or (), run)
        if not found:
            raise Problem("the audit knows of no such ref that was deleted; `forgekeeper audit` shows what it knows")
        became = list[tuple[Deleted, Restored]]()
        unknown = [number for number in which or () if number not in {one.id for one in found}]
        try:
            became.extend(restoring.restore(found, settings, dry_run=dry_run))
        except (RootUnavailable, PeeweeException) as error:
            # What was restored before is on standard output all the same.
            if became:
                _say(became, unknown, dry_run=dry_run, json=json)
            if isinstance(error, RootUnavailable):
                raise Problem(str(error)) from None
            raise
    if _say(became, unknown, dry_run=dry_run, json=json) < len(became) + len(unknown):
        raise typer.Exit(FAILED)


def _say(became: Sequence[tuple[Deleted, Restored]], unknown: Sequence[int], *, dry_run: bool, json: bool) -> int:
    """Say what became of each, in lines that no terminal cuts; return how many were restored, or could be."""
    done = sum(outcome in (RESTORED, POSSIBLE) for _, outcome in became)
    if json:
        entries = [
            one._asdict() | {"state": outcome.state, "reason": outcome.reason, "command": outcome.command}
            for one, outcome in became
        ]
        emit({"restored": 0 if dry_run else done, "dry_run": dry_run, "entries": entries, "unknown": unknown})
        return done
    for one, outcome in became:
        write(f"deletion {one.id}, project {one.project_id}, {visible(one.ref)} at {visible(one.oid)}: {outcome.state}")
        if outcome.reason:
            write(f"    {printable(outcome.reason)}")
        if outcome.command:
            write(f"    {_shell(outcome.command)}")
    for number in unknown:
        write(f"the audit knows of no ref that was deleted for {number}")
    write(f"{done} of {len(became) + len(unknown)} {'could be' if dry_run else 'were'} restored")
    return done


def _shell(words: Iterable[str]) -> str:
    """Write a command that can be copied: what is not printable is in bash's escapes."""
    return " ".join(quote(word) if word.isprintable() else f"$'{''.join(map(_octal, word))}'" for word in words)


def _octal(character: str) -> str:
    if character.isprintable() and character not in "\\'":
        return character
    return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", "surrogateescape"))
