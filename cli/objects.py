"""What is at work or was given up: `buckets`, `uploads`, `objects`."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import Annotated, Any

import typer

from cli.connection import connected, require_redis
from cli.console import Json, Problem, answer, emit, moment, out, table, wrong_use
from coordination import buckets as bucket_register
from coordination import uploads as register
from models import DeletedObject, JobArtifact, now
from storage.objects import StoreUnavailable
from workers import stores
from workers.clients import client

ORPHAN_AFTER = timedelta(days=1)
"""An upload may last three hours; whatever is a day old and named by nothing was left behind."""
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
    """List the uploads that were given up."""
    with connected("uploads"):
        require_redis()
        failures = register.failed(client, limit)
        total = int(client.zcard(register.FAILED))
    if json:
        emit({"failed": total, "entries": [asdict(failure) for failure in failures]})
        return
    table("", ("entry", "attempts", "given up"), ((f.member, f.attempts, moment(f.at)) for f in failures))
    out.print(f"{total} in all")


@uploads.command("retry")
def uploads_retry(
    path: Annotated[str | None, typer.Argument(help="An entry as `failed` lists it: location:path.")] = None,
    everything: All = False,
    json: Json = False,
) -> None:
    """Try uploads that were given up anew, at the next run."""
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
    prefix: Annotated[str, typer.Option(help="Where uploads lie in the store.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    json: Json = False,
) -> None:
    """Find objects older than a day that neither an artifact, the outbox nor the register names.

    They are put into the register, from where the batch `stale_direct_uploads` deletes them.
    """
    with connected("uploads") as settings:
        require_redis()
        if location not in settings.object_stores:
            wrong_use(
                f"there is no object store {location!r}; there are: {', '.join(settings.object_stores) or 'none'}"
            )
        try:
            store = stores.at(location, settings)
            assert store is not None
            horizon = now() - ORPHAN_AFTER
            found = list(store.listed(prefix, before=horizon))
            unnamed = [path for page in _pages(found) for path in _unnamed(location, page)]
            # A listing may spell a name otherwise than its object does, and so mean another.
            orphans = [path for path in unnamed if store.has(path, before=horizon)]
        except StoreUnavailable as error:
            hint = "leave a name that cannot be listed out with --prefix; else `forgekeeper check` looks for the cause"
            raise Problem(f"object store {error}; {hint}") from error
        adopted = 0 if dry_run else sum(_adopt(location, page) for page in _pages(orphans))
    if json:
        emit({"location": location, "examined": len(found), "orphans": orphans, "registered": adopted})
        return
    for path in orphans:
        out.print(path)
    out.print(
        f"{len(found)} objects older than a day, {len(orphans)} named by nothing, {adopted} put into the register"
    )


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


def _unnamed(location: str, paths: list[str]) -> list[str]:
    named = register.registered(client, location, paths) | DeletedObject.named(paths) | JobArtifact.named(paths)
    return [path for path in paths if path not in named]


def _adopt(location: str, paths: list[str]) -> int:
    return register.adopt(client, location, paths, age=ORPHAN_AFTER)


def _pages(paths: list[str]) -> list[list[str]]:
    return [paths[start : start + PAGE] for start in range(0, len(paths), PAGE)]
