"""Objects of a store that nothing names: `uploads` puts them into the register, where a person can still withdraw them.

There they are *adopted* (batch 100).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from typing import Annotated, Any, NamedTuple

import redis
import typer
from peewee import chunked

from forgekeeper.audit import acts
from forgekeeper.cli import connection
from forgekeeper.cli.terminal import All, Json, Problem, emit, moment, visible, write, wrong_use
from forgekeeper.platform.connections import call, client
from forgekeeper.platform.coordination.values import text
from forgekeeper.platform.database import now
from forgekeeper.platform.settings import Settings
from forgekeeper.targets import stores
from forgekeeper.targets.outcomes import OUTSIDE, StoreUnavailable
from models import JobArtifact
from workers.stale_direct_uploads import bridge, register, stale_direct_uploads
from workers.stale_direct_uploads.entries import member
from workers.stale_direct_uploads.keys import (
    ADOPTED,
    DELETING,
    FAILED,
    MAX_UPLOAD_DURATION,
    PAGE,
    PENDING,
    REFERENCE,
)
from workers.stale_direct_uploads.register import ADOPTION

ORPHAN_AFTER = timedelta(days=1)
"""An upload may last three hours; whatever is a day old and named by nothing was left behind."""
MOST_UNNAMED = 0.1
"""A larger share of the objects that nothing names speaks of another database, or of a store that others share."""

uploads = typer.Typer(help="Objects in a store that nobody answers for.")
COMMANDS = {"uploads": uploads}


class Found(NamedTuple):
    """What lies below a prefix: how many objects older than a day, how many of them the database names, and the rest.

    *orphans* are those that nothing names, not even the register; *outside* counts such as may not be deleted.
    """

    examined: int
    named: int
    orphans: list[str]
    outside: int

    def refusal(self, expect: int | None) -> str | None:
        """Return why the orphans must not be registered, None if they may; *expect* is their number, repeated."""
        number = len(self.orphans)
        if expect is not None:
            return None if expect == number else f"{expect} objects were expected and {number} are named by nothing"
        repeat = f"if they may all go, repeat their number: --expect {number}"
        if number and not self.named:
            return f"nothing in this database names any of the {self.examined} objects: is it the right one? {repeat}"
        if number > MOST_UNNAMED * self.examined:
            return f"{number} of {self.examined} objects are named by nothing, more than {MOST_UNNAMED:.0%}; {repeat}"
        return None


class Withdrawn(NamedTuple):
    """What became of entries to withdraw: those taken off the register, and those that are being deleted right now."""

    forgotten: list[str]
    too_late: list[str]


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
    `stale_direct_uploads` deletes them; `uploads forget` takes them back until then.  It refuses while a run of that
    batch would be blocked.
    """
    with connection.connected("uploads") as settings:
        connection.require_redis()
        # If a run would be blocked, nothing proves that no row and no entry names an object.
        connection.require_unblocked(stale_direct_uploads, settings)
        found = _look(location, prefix, settings)
        refusal = found.refusal(expect)
        if yes and refusal:
            raise Problem(refusal)
        if yes and found.orphans:
            after = {"expected": expect} | acts.some(found.orphans)
            acts.record("uploads reconcile", f"{location}:{prefix}", batch="stale_direct_uploads", after=after)
        registered = adopt(client, location, found.orphans) if yes else 0
        due = now() + ADOPTION if registered else None
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
    with connection.connected("uploads"):
        connection.require_redis()
        adopted: Any = client.zrange(ADOPTED, 0, -1)
        chosen = [entry for entry in map(text, adopted) if path in (None, entry)]
        if chosen:
            acts.record("uploads forget", path or "all", batch="stale_direct_uploads", before=acts.some(chosen))
        forgotten, too_late = answer = withdraw(client, chosen)
    if path is not None and not forgotten:
        why = "being deleted just now" if too_late else "not among what `reconcile` has registered"
        raise Problem(f"{path} is {why}")
    if json:
        emit(answer._asdict())
        return
    for entry in forgotten:
        write(visible(entry))
    write(f"{len(forgotten)} forgotten" + (f", too late for {len(too_late)}" if too_late else ""))


def adopt(client: redis.Redis, location: str, paths: Collection[str]) -> int:
    """Register objects, unchanged for a day, that nothing names; return how many are new.

    They wait for `ADOPTION`, in which `withdraw` takes them back, and are stale from then on: they are deleted as every
    stale upload is, with all its checks.
    """
    head_start = math.ceil((ADOPTION - MAX_UPLOAD_DURATION).total_seconds())
    pages = chunked((member(location, path) for path in paths), PAGE)
    keys = [PENDING, DELETING, FAILED, ADOPTED, *([REFERENCE] if bridge.bridges(client) else [])]
    return sum(int(call(client, "upload_adopt", keys=keys, args=[head_start, *page])) for page in pages)


def withdraw(client: redis.Redis, members: Sequence[str]) -> Withdrawn:
    """Take adopted entries off the register: their objects stay.

    What a producer has registered stays there.  It is too late for what a run has claimed: its object is about to go.
    """
    became = list(zip(members, register.settle(client, "withdraw", members), strict=True))
    return Withdrawn([one for one, answer in became if answer == 1], [one for one, answer in became if answer == -1])


def _look(location: str, prefix: str, settings: Settings) -> Found:
    """Find what was left behind below *prefix*; end the command where the store cannot be used."""
    if location not in settings.object_stores:
        wrong_use(f"there is no object store {location!r}; there are: {', '.join(settings.object_stores) or 'none'}")
    try:
        store = stores.at(location, settings)
        assert store is not None
        horizon = now() - ORPHAN_AFTER
        found, named, unnamed = store.listed(prefix, before=horizon), 0, list[str]()
        for page in chunked(found, PAGE):
            in_database = stores.answered_for(JobArtifact, location, page, settings)
            named += len(in_database)
            known = in_database.keys() | _registered(location, page)
            unnamed += [path for path in page if path not in known]
        allowed = [path for path in unnamed if store.may_delete(path)]
        # A listing may spell a name otherwise than its object does, and so mean another.
        orphans = [path for path in allowed if (written := store.written(path)) is not None and written < horizon]
        return Found(len(found), named, orphans, len(unnamed) - len(allowed))
    except StoreUnavailable as error:
        hint = "leave a name that cannot be listed out with --prefix; else `forgekeeper check` looks for the cause"
        raise Problem(f"object store {error}; {hint}") from error


def _registered(location: str, paths: Sequence[str]) -> Iterator[str]:
    """Yield those of *paths* that the register names, pending or not."""
    members = [f"{location}:{path}" for path in paths]
    scores = [client.zmscore(key, members) for key in (PENDING, DELETING, FAILED)]
    theirs = bridge.named(client, members)
    for path, name, *found in zip(paths, members, *scores, strict=True):
        if name in theirs or any(score is not None for score in found):
            yield path
