"""`uploads`: register orphaned objects of a store; a person can still withdraw them.

The register of a batch *adopts* them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated, Any, NamedTuple

import typer
from peewee import chunked

from forgekeeper.api.batches import BATCHES, BatchSpec
from forgekeeper.audit import acts
from forgekeeper.cli import connection
from forgekeeper.cli.terminal import (
    All,
    Json,
    Problem,
    escape_unprintable,
    format_time,
    print_json,
    write_line,
    wrong_use,
)
from forgekeeper.platform.connections import client
from forgekeeper.platform.coordination.redis_values import decode_text
from forgekeeper.platform.database import now
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.register.keys import ENTRIES_PER_COMMAND
from forgekeeper.sources.register.redis_register import ADOPTION_DELAY, RedisRegister
from forgekeeper.targets import stores
from forgekeeper.targets.outcomes import OUTSIDE_PREFIXES_REASON, StoreUnavailable

ORPHAN_AFTER = timedelta(days=1)
"""Minimum age of an orphaned object; an upload takes some hours."""
MAX_UNNAMED_SHARE = 0.1
"""Maximum share of objects that nothing names.

A larger share indicates another database, or a shared store.
"""

uploads = typer.Typer(name="uploads", help="Find orphaned objects in a store, which no row and no register names.")
RegisterBatch = Annotated[
    str | None,
    typer.Option("--batch", metavar="BATCH", help="The batch of the register; needed only if there are several."),
]


class OrphanScan(NamedTuple):
    """Objects below a prefix: the number *examined* (older than a day), and *named* by rows.

    *orphans* are named by nothing, not even a register; *outside* counts orphans that may not be deleted.
    """

    examined: int
    named: int
    orphans: list[str]
    outside: int

    def explain_refusal(self, expect: int | None) -> str | None:
        """Return why the orphans must not be registered; None if they may.

        *expect* is the number of orphans, repeated by a person.
        """
        number = len(self.orphans)
        if expect is not None:
            return None if expect == number else f"--expect says {expect} objects, but {number} are orphaned"
        repeat = f"if all of them may be deleted, repeat their number: --expect {number}"
        if number and not self.named:
            return f"this database names none of the {self.examined} objects: is it the right database? {repeat}"
        if number > MAX_UNNAMED_SHARE * self.examined:
            return f"{number} of {self.examined} objects are orphaned, more than {MAX_UNNAMED_SHARE:.0%}; {repeat}"
        return None


class RegisterHolder(NamedTuple):
    """A batch, its register, and the model that names objects."""

    batch: BatchSpec
    register: RedisRegister
    owner: Any


def find_holders() -> list[RegisterHolder]:
    """Return all batches that have a register."""
    return [
        RegisterHolder(batch, RedisRegister(objects.register), None if objects.unless is None else objects.unless.owner)
        for batch in BATCHES.values()
        if (objects := batch.registered_objects) is not None
    ]


def _require_holder(name: str | None) -> RegisterHolder:
    """Return the batch with that *name*, or the only batch with a register if None.

    Raises `Problem` unless exactly one batch fits.
    """
    holders = find_holders()
    found = [one for one in holders if name in (None, one.batch.name)]
    names = ", ".join(one.batch.name for one in holders)
    if not found:
        wrong_use(f"{name} has no register of uploads; these batches have a register: {names}")
    if len(found) > 1:
        wrong_use(f"several batches have a register of uploads; name one with --batch: {names}")
    return found[0]


@uploads.command("reconcile")
def uploads_reconcile(
    location: Annotated[str, typer.Argument(help="The object store's location.")],
    *,
    prefix: Annotated[str, typer.Option(help="The folder of the store that has the uploads; '' is the whole store.")],
    yes: Annotated[bool, typer.Option("--yes", help="Register the objects, to be deleted a day later.")] = False,
    expect: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Only if exactly N objects are orphaned.")
    ] = None,
    batch: RegisterBatch = None,
    json: Json = False,
) -> None:
    """Show orphaned objects: older than a day, and named by no artifact, outbox or register.

    With --yes they are registered, and the batch of the register deletes them a day later; until then `uploads forget`
    removes them from the register.  The command fails while a run of that batch would be blocked.
    """
    holder = _require_holder(batch)
    with connection.connect_command("uploads") as settings:
        connection.require_redis()
        # If a run would be blocked, missing rows and entries do not prove that nothing names an object.
        for one in find_holders():
            connection.require_unblocked(one.batch, settings)
        found = _scan_store(holder, location, prefix, settings)
        refusal = found.explain_refusal(expect)
        if yes and refusal:
            raise Problem(refusal)
        if yes and found.orphans:
            after = {"expected": expect} | acts.summarize_things(found.orphans)
            acts.record_act("uploads reconcile", f"{location}:{prefix}", batch=holder.batch.name, after=after)
        registered = holder.register.adopt(client, location, found.orphans) if yes else 0
        due = now() + ADOPTION_DELAY if registered else None
    if json:
        counts = {"location": location, "prefix": prefix, **found._asdict()}
        print_json(counts | {"registered": registered, "due": due, "refused": refusal})
        return
    for path in found.orphans:
        write_line(escape_unprintable(path))
    write_line(f"{found.examined} objects older than a day, {len(found.orphans)} orphaned, {registered} registered")
    if found.outside:
        write_line(f"{found.outside} more orphaned objects are kept, because they are {OUTSIDE_PREFIXES_REASON}")
    if registered:
        write_line(f"they will be deleted after {format_time(due)} UTC, unless you run `forgekeeper uploads forget`")
    elif found.orphans:
        write_line(f"--yes would be refused: {refusal}" if refusal else "use --yes to register them")


@uploads.command("forget")
def uploads_forget(
    path: Annotated[str | None, typer.Argument(help="An entry that `reconcile` registered: location:path.")] = None,
    everything: All = False,
    batch: RegisterBatch = None,
    json: Json = False,
) -> None:
    """Remove entries that `uploads reconcile` has registered: their objects are kept.

    Entries of producers are never removed.
    """
    if (path is None) != everything:
        wrong_use("name an entry, or use --all")
    holder = _require_holder(batch)
    with connection.connect_command("uploads"):
        connection.require_redis()
        adopted: Any = client.zrange(holder.register.keys.adopted, 0, -1)
        chosen = [entry for entry in map(decode_text, adopted) if path in (None, entry)]
        if chosen:
            acts.record_act(
                "uploads forget", path or "all", batch=holder.batch.name, before=acts.summarize_things(chosen)
            )
        forgotten, too_late = answer = holder.register.withdraw(client, chosen)
    if path is not None and not forgotten:
        why = "being deleted now" if too_late else "not an entry that `uploads reconcile` registered"
        raise Problem(f"{path} is {why}")
    if json:
        print_json(answer._asdict())
        return
    for entry in forgotten:
        write_line(escape_unprintable(entry))
    write_line(f"{len(forgotten)} forgotten" + (f", too late for {len(too_late)}" if too_late else ""))


def _scan_store(holder: RegisterHolder, location: str, prefix: str, settings: Settings) -> OrphanScan:
    """Find orphaned objects below *prefix*; raise `Problem` if the store cannot be used."""
    if location not in settings.object_stores:
        wrong_use(f"there is no object store {location!r}; there are: {', '.join(settings.object_stores) or 'none'}")
    try:
        store = stores.for_location(location, settings)
        assert store is not None
        horizon = now() - ORPHAN_AFTER
        found, named, unnamed = store.list_paths(prefix, before=horizon), 0, list[str]()
        for page in chunked(found, ENTRIES_PER_COMMAND):
            in_database = stores.find_kept_paths(holder.owner, location, page, settings)
            named += len(in_database)
            known = in_database.keys() | _find_registered(location, page)
            unnamed += [path for path in page if path not in known]
        allowed = [path for path in unnamed if store.may_delete(path)]
        # A listing may spell a name differently from the object, and so refer to another object.
        orphans = [
            path for path in allowed if (written := store.read_last_modified(path)) is not None and written < horizon
        ]
        return OrphanScan(len(found), named, orphans, len(unnamed) - len(allowed))
    except StoreUnavailable as error:
        hint = "choose a --prefix without names that cannot be listed, or run `forgekeeper check` to find the cause"
        raise Problem(f"object store {error}; {hint}") from error


def _find_registered(location: str, paths: Sequence[str]) -> set[str]:
    """Return the *paths* that a register names, pending or not."""
    return {path for holder in find_holders() for path in holder.register.find_registered(client, location, paths)}
