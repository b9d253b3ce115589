"""Objects that nobody answers for: `uploads`."""

from __future__ import annotations

from typing import Annotated

import typer

from forgekeeper.audit import acts
from forgekeeper.cli.connection import connected, require_redis
from forgekeeper.cli.console import All, Json, Problem, emit, moment, visible, write, wrong_use
from forgekeeper.connections import client
from forgekeeper.database import now
from forgekeeper.storage.objects import OUTSIDE
from workers.stale_direct_uploads import adoption, register

uploads = typer.Typer(help="Objects in a store that nobody answers for.")
COMMANDS = {"uploads": uploads}


@uploads.command("reconcile")
def uploads_reconcile(
    location: Annotated[str, typer.Argument(help="The object store's location.")],
    *,
    prefix: Annotated[str, typer.Option(help="The folder of the store in which uploads lie; '' is the whole store.")],
    yes: Annotated[bool, typer.Option("--yes", help="Register them, to be deleted a day later.")] = False,
    expect: Annotated[int | None, typer.Option(min=0, metavar="N", help="Only if there are exactly so many.")] = None,
    json: Json = False,
) -> None:
    """Show objects older than a day that neither an artifact, the outbox nor the register names.

    With --yes they are put into the register, where they wait another day before the batch
    `stale_direct_uploads` deletes them; `uploads forget` takes them back until then.
    """
    with connected("uploads") as settings:
        require_redis()
        found = adoption.look(client, location, prefix, settings)
        refusal = found.refusal(expect)
        if yes and refusal:
            raise Problem(refusal)
        if yes and found.orphans:
            after = {"expected": expect} | acts.some(found.orphans)
            acts.record("uploads reconcile", f"{location}:{prefix}", batch="stale_direct_uploads", after=after)
        registered = sum(adoption.adopt(client, location, page) for page in register.pages(found.orphans)) if yes else 0
        due = now() + register.ADOPTION if registered else None
    if json:
        counts = {"location": location, "prefix": prefix, **found._asdict()}
        emit(counts | {"registered": registered, "due": due, "refused": refusal})
        return
    for path in found.orphans:
        write(visible(path))
    write(f"{found.examined} objects older than a day, {len(found.orphans)} named by nothing, {registered} registered")
    if found.outside:
        write(f"{found.outside} more named by nothing, but {OUTSIDE}: they stay")
    if registered:
        write(f"they will be deleted from {moment(due)} UTC on; `forgekeeper uploads forget` takes that back")
    elif found.orphans:
        write(f"--yes would be refused: {refusal}" if refusal else "say --yes to register them")


@uploads.command("forget")
def uploads_forget(
    path: Annotated[str | None, typer.Argument(help="An entry that `reconcile` registered: location:path.")] = None,
    everything: All = False,
    json: Json = False,
) -> None:
    """Take back what `uploads reconcile` has registered: the objects stay.

    What a producer has registered is never forgotten.
    """
    if (path is None) != everything:
        wrong_use("name one entry, or say --all")
    with connected("uploads"):
        require_redis()
        chosen = [member for member in adoption.adopted(client) if path in (None, member)]
        if chosen:
            acts.record("uploads forget", path or "all", batch="stale_direct_uploads", before=acts.some(chosen))
        answers = [adoption.withdraw(client, page) for page in register.pages(chosen)]
    forgotten = [member for answer in answers for member in answer.members]
    too_late = [member for answer in answers for member in answer.too_late]
    if path is not None and not forgotten:
        why = "being deleted just now" if too_late else "not among what `reconcile` has registered"
        raise Problem(f"{path} is {why}")
    if json:
        emit({"forgotten": forgotten, "too_late": too_late})
        return
    for member in forgotten:
        write(visible(member))
    write(f"{len(forgotten)} forgotten" + (f", too late for {len(too_late)}" if too_late else ""))
