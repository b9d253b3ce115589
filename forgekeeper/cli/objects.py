"""What is at work or was given up: `buckets`, `uploads`, `objects`."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import Annotated, Any, NamedTuple

import typer

from forgekeeper.cli.connection import connected, require_redis
from forgekeeper.cli.console import Json, Problem, answer, emit, moment, out, table, wrong_use
from forgekeeper.connections import client
from forgekeeper.database import now
from forgekeeper.settings import Settings
from forgekeeper.storage import owners, stores
from forgekeeper.storage.objects import OUTSIDE, StoreUnavailable, is_below, is_normal
from forgekeeper.storage.outbox import DeletedObject
from models import JobArtifact
from workers.expired_job_artifacts import buckets as bucket_register
from workers.stale_direct_uploads import MAX_UPLOAD_DURATION
from workers.stale_direct_uploads import register as register

ORPHAN_AFTER = timedelta(days=1)
"""An upload may last three hours; whatever is a day old and named by nothing was left behind."""
MOST_UNNAMED = 0.1
"""A larger share of the objects that nothing names speaks of another database, or of a store that others share."""
PAGE = 1_000

uploads = typer.Typer(help="Direct uploads that could not be deleted, and objects that nobody answers for.")
objects = typer.Typer(help="Objects of deleted artifacts that could not be deleted.")
All = Annotated[bool, typer.Option("--all", help="Every one of them.")]


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


def bucket_states() -> dict[str, list[Any]]:
    """Return the numbers of the available buckets, and of the occupied ones number, since and token."""
    occupied = [one._asdict() for one in bucket_register.held(client)]
    return {"available": bucket_register.available(client), "occupied": occupied}


@uploads.callback(invoke_without_command=True)
def uploads_default(context: typer.Context) -> None:
    """List the failed uploads when no command is given."""
    if context.invoked_subcommand is None:
        uploads_failed()


@uploads.command("failed")
def uploads_failed(
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many, oldest first.")] = 100, json: Json = False
) -> None:
    """List the uploads that could not be deleted: those that were given up, and those that will be tried again."""
    with connected("uploads") as settings:
        require_redis()
        failures = register.failed(client, limit)
        total = int(client.zcard(register.FAILED))
        failing = register.failing(client)
    shown = [*failures, *failing[: limit - len(failures)]]
    if json:
        entries = [
            {name: value for name, value in asdict(one).items() if name != "adopted"}
            | {"reason": _reason(one, settings)}
            for one in shown
        ]
        emit({"failed": total, "failing": len(failing), "entries": entries})
        return
    rows = (
        (f.member, f.attempts, f.at and moment(f.at), f.again and moment(f.again), _reason(f, settings)) for f in shown
    )
    table("", ("entry", "attempts", "given up", "will be tried again", "because"), rows)
    out.print(f"{total} in all" + (f", and {len(failing)} that will be tried again" if failing else ""))


@uploads.command("retry")
def uploads_retry(
    path: Annotated[str | None, typer.Argument(help="An entry as `failed` lists it: location:path.")] = None,
    everything: All = False,
    json: Json = False,
) -> None:
    """Try uploads that could not be deleted anew, at the next run."""
    if (path is None) != everything:
        wrong_use("name one entry, or say --all")
    with connected("uploads"):
        require_redis()
        retried = register.retry(client, None if path is None else [path])
    if path is not None and not retried:
        raise Problem(f"{path} is not among the failed uploads; `forgekeeper uploads failed` lists them")
    answer({"retried": retried}, f"{retried} will be tried anew", json=json)


@uploads.command("reconcile")
def uploads_reconcile(
    location: Annotated[str, typer.Argument(help="The object store's location.")],
    *,
    prefix: Annotated[str, typer.Option(help="The folder of the store in which uploads lie; '' is the whole store.")],
    yes: Annotated[bool, typer.Option("--yes", help="Register them, to be deleted a day later.")] = False,
    expect: Annotated[int | None, typer.Option(min=0, metavar="N", help="Only if there are exactly so many.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", hidden=True)] = False,
    json: Json = False,
) -> None:
    """Show objects older than a day that neither an artifact, the outbox nor the register names.

    With --yes they are put into the register, where they wait another day before the batch
    `stale_direct_uploads` deletes them; `uploads forget` takes them back until then.
    """
    if yes and dry_run:
        wrong_use("say --yes or --dry-run, not both")
    with connected("uploads") as settings:
        require_redis()
        found = _look(location, prefix, settings)
        refusal = found.refusal(expect)
        if yes and refusal:
            raise Problem(refusal)
        registered = sum(_adopt(location, page) for page in _pages(found.orphans)) if yes else 0
        due = now() + register.ADOPTION if registered else None
    if json:
        counts = {"location": location, "prefix": prefix, "examined": found.examined, "named": found.named}
        counts |= {"outside": found.outside}
        emit({**counts, "orphans": found.orphans, "registered": registered, "due": due, "refused": refusal})
        return
    for path in found.orphans:
        out.print(path)
    out.print(
        f"{found.examined} objects older than a day, {len(found.orphans)} named by nothing, "
        f"{registered} put into the register"
    )
    if found.outside:
        out.print(f"{found.outside} more named by nothing, but {OUTSIDE}: they stay")
    if registered:
        out.print(f"they will be deleted from {moment(due)} UTC on; `forgekeeper uploads forget` takes that back")
    elif found.orphans and not yes:
        out.print(f"--yes would be refused: {refusal}" if refusal else "say --yes to register them")


@uploads.command("forget")
def uploads_forget(
    path: Annotated[str | None, typer.Argument(help="An entry that `reconcile` registered: location:path.")] = None,
    everything: All = False,
    prefix: Annotated[str, typer.Option(help="With --all: only those below this folder of their store.")] = "",
    json: Json = False,
) -> None:
    """Take back what `uploads reconcile` has registered: the objects stay.

    What a producer has registered is never forgotten.
    """
    if (path is None) != everything or (prefix and not everything):
        wrong_use("name one entry, or say --all, with or without --prefix")
    with connected("uploads"):
        require_redis()
        chosen = [member for member in register.adopted(client) if _is_below(prefix, member)] if everything else [path]
        answers = [register.withdraw(client, page) for page in _pages([one for one in chosen if one is not None])]
    forgotten = [member for answer in answers for member in answer.members]
    too_late = [member for answer in answers for member in answer.too_late]
    if path is not None and not forgotten:
        raise Problem(
            f"{path} is being deleted just now" if too_late else f"{path} is not among what `reconcile` has registered"
        )
    if json:
        emit({"forgotten": forgotten, "too_late": too_late})
        return
    for member in forgotten:
        out.print(member)
    out.print(f"{len(forgotten)} forgotten" + (f", too late for {len(too_late)}" if too_late else ""))


@objects.callback(invoke_without_command=True)
def objects_default(context: typer.Context) -> None:
    """List the dead objects when no command is given."""
    if context.invoked_subcommand is None:
        objects_failed()


@objects.command("failed")
def objects_failed(
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many, oldest first.")] = 100, json: Json = False
) -> None:
    """List the objects that were given up."""
    with connected("objects"):
        total = DeletedObject.dead().count()
        dead = [(row.id, row.path, row.attempts, row.created_at) for row in DeletedObject.dead().limit(limit)]
    if json:
        fields = ("id", "path", "attempts", "created_at")
        emit({"failed": total, "entries": [dict(zip(fields, row, strict=True)) for row in dead]})
        return
    table("", ("id", "path", "attempts", "since"), ((*row[:3], moment(row[3])) for row in dead))
    out.print(f"{total} in all")


@objects.command("retry")
def objects_retry(
    number: Annotated[int | None, typer.Argument(metavar="[ID]", help="Its id, as `failed` lists it.")] = None,
    everything: All = False,
    json: Json = False,
) -> None:
    """Try objects that were given up anew, at the next run."""
    if (number is None) != everything:
        wrong_use("name one object by its id, or say --all")
    with connected("objects"):
        retried = DeletedObject.retry(None if number is None else [number])
    if number is not None and not retried:
        raise Problem(f"{number} is not among the dead objects; `forgekeeper objects failed` lists them")
    answer({"retried": retried}, f"{retried} will be tried anew", json=json)


def _reason(entry: register.Entry, settings: Settings) -> str | None:
    """Say why the entry could not be deleted by these settings; None where that is the store's to say, in the log."""
    if entry.malformed or not is_normal(entry.path):
        return "it names no object"
    if entry.location not in settings.object_stores:
        return f"no store is configured for {entry.location}"
    within = is_below(settings.object_prefixes.get(entry.location, ()), entry.path)
    return None if within else f"it is {OUTSIDE}"


class _Found(NamedTuple):
    """What lies below a prefix: how many objects older than a day, how many of them the database names, and the rest.

    *orphans* are those that nothing names, not even the register; *outside* counts such as may not be deleted.
    """

    examined: int
    named: int
    orphans: list[str]
    outside: int = 0

    def refusal(self, expect: int | None) -> str | None:
        """Say why the orphans must not be registered, None if they may; *expect* is their number, repeated."""
        number = len(self.orphans)
        if expect is not None:
            return None if expect == number else f"{expect} objects were expected and {number} are named by nothing"
        repeat = f"if they may all go, repeat their number: --expect {number}"
        if number and not self.named:
            return f"nothing in this database names any of the {self.examined} objects: is it the right one? {repeat}"
        if number > MOST_UNNAMED * self.examined:
            return f"{number} of {self.examined} objects are named by nothing, more than {MOST_UNNAMED:.0%}; {repeat}"
        return None


def _look(location: str, prefix: str, settings: Settings) -> _Found:
    if location not in settings.object_stores:
        wrong_use(f"there is no object store {location!r}; there are: {', '.join(settings.object_stores) or 'none'}")
    try:
        store = stores.at(location, settings)
        assert store is not None
        horizon = now() - ORPHAN_AFTER
        found = list(store.listed(prefix, before=horizon))
        named, unnamed = _sorted_out(location, found, settings)
        allowed = [path for path in unnamed if store.may_delete(path)]
        # A listing may spell a name otherwise than its object does, and so mean another.
        orphans = [path for path in allowed if store.has(path, before=horizon)]
        return _Found(len(found), named, orphans, len(unnamed) - len(allowed))
    except StoreUnavailable as error:
        hint = "leave a name that cannot be listed out with --prefix; else `forgekeeper check` looks for the cause"
        raise Problem(f"object store {error}; {hint}") from error


def _sorted_out(location: str, paths: list[str], settings: Settings) -> tuple[int, list[str]]:
    """Count the *paths* that the database names, and return those that neither it nor the register does."""
    named, unnamed = 0, []
    for page in _pages(paths):
        in_database = owners.answered_for(JobArtifact, location, page, settings)
        named += len(in_database)
        known = in_database.keys() | register.registered(client, location, page)
        unnamed += [path for path in page if path not in known]
    return named, unnamed


def _adopt(location: str, paths: list[str]) -> int:
    return register.adopt(client, location, paths, stale_after=MAX_UPLOAD_DURATION)


def _is_below(prefix: str, member: str) -> bool:
    path = member.partition(":")[2]
    return not prefix.strip("/") or path.startswith(f"{prefix.strip('/')}/")


def _pages(paths: list[str]) -> list[list[str]]:
    return [paths[start : start + PAGE] for start in range(0, len(paths), PAGE)]
