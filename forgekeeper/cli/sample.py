"""`seed`: sample data, into a database that is forgekeeper's own."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated

import typer
from rich.progress import Progress

from forgekeeper import migrations
from forgekeeper.cli.connection import connected, require_redis
from forgekeeper.cli.console import Json, Problem, emit, err, out, table
from forgekeeper.connections import client
from forgekeeper.database import database
from forgekeeper.settings import Settings
from forgekeeper.storage import git_sample, stores
from workers import sample, stale_imports, user_status_cleanup
from workers.stale_direct_uploads import register as register

STATUSES, IMPORTS, ARTIFACTS, UPLOADS, PROJECTS, REFS = 5_000, 200, 1_000, 200, 10, 100
MALFORMED = ("no location at all", "artifacts:", "artifacts:../../etc/passwd")
"""Members of the register that no upload can have made: they end as failed, and stop nobody else."""
UNKNOWN = ("nowhere:uploads/a:b",)
"""Members whose location is not configured: they are tried again, and stop nobody else."""
REFUSED = ("HEAD", "main", "refs/heads/main", "refs/heads/a..b", "refs/heads/two\nlines", "refs/" + 1_020 * "x")
"""Refs that nobody may have deleted this way: they end as rejected, and stop no other."""


@dataclass(frozen=True)
class Seeded:
    """What was put in: how many in all, and how many of them are due."""

    what: str
    total: int
    due: int


def seed(
    scale: Annotated[int, typer.Option(min=0, help="So many times the usual amount; 0: the tables alone.")] = 1,
    json: Json = False,
) -> None:
    """Fill the database with sample data, beside what is there; make the example forge's tables first.

    Refuses a database that holds a forge's own tables.
    """
    with connected("seed") as settings:
        require_redis()
        seeded = fill(scale, settings)
    if not seeded and not json:
        out.print("the tables of the example forge are there; no sample data was put in")
    elif json:
        emit({made.what.replace(" ", "_"): {"total": made.total, "due": made.due} for made in seeded})
    else:
        table("", ("sample data", "total", "due"), ((made.what, f"{made.total:,}", f"{made.due:,}") for made in seeded))


def fill(scale: int, settings: Settings) -> list[Seeded]:
    """Put sample data in, with progress on a terminal; return what was put in."""
    try:
        migrations.migrate(database.obj, "example")
    except migrations.TableExists as error:
        raise Problem(f"{error}: this database is a forge's own, sample data does not belong there") from error
    samples: tuple[Callable[[int, Settings], Seeded], ...] = (_user_statuses, _refs, _imports, _artifacts, _uploads)
    seeded: list[Seeded] = []
    if scale == 0:
        return seeded
    with Progress(console=err, disable=not err.is_terminal, transient=True) as progress:
        task = progress.add_task("sample data", total=len(samples))
        for make in samples:
            seeded.append(make(scale, settings))
            progress.advance(task)
    return seeded


def _user_statuses(scale: int, _settings: Settings) -> Seeded:
    total = STATUSES * scale
    return Seeded("user statuses", total, user_status_cleanup.sample(total))


def _refs(scale: int, settings: Settings) -> Seeded:
    """Repositories half of whose merge requests are closed; one was never created, and one project has gone."""
    root = settings.repositories_root
    if root is None:
        return Seeded("git refs", 0, 0)
    projects = sample.projects(PROJECTS * scale)
    refs = [f"refs/merge-requests/{n}/head" for n in range(REFS)]
    doomed = refs[: REFS // 2]
    _never_created, *existing = projects.items()
    for _, disk_path in existing:
        git_sample.create(root, disk_path, refs)
    nobody = max(projects) + 1_000_000
    sample.ref_deletions([*projects, nobody], doomed)
    sample.ref_deletions([existing[0][0]], REFUSED)
    return Seeded("git refs", len(existing) * (REFS + 1), len(existing) * len(doomed))


def _imports(scale: int, _settings: Settings) -> Seeded:
    total = IMPORTS * scale
    return Seeded("bulk imports", total, stale_imports.sample(total))


def _artifacts(scale: int, settings: Settings) -> Seeded:
    """Artifacts with their objects, but one: it never arrived."""
    total = ARTIFACTS * scale
    paths, due = sample.artifacts(total)
    store = stores.at(stores.ARTIFACTS, settings)
    if store is not None:
        store.put(paths[1:])
    return Seeded("job artifacts", total, due)


def _uploads(scale: int, settings: Settings) -> Seeded:
    """Register uploads of yesterday and of just now, and a few entries that only a bug could write."""
    total = UPLOADS * scale
    names = [f"uploads/{secrets.token_hex(4)}:{n}" for n in range(total)]
    stale, fresh = names[: total // 2], names[total // 2 :]
    yesterday = client.time()[0] - timedelta(days=1).total_seconds()
    if stale:
        client.zadd(register.PENDING, {f"{stores.ARTIFACTS}:{name}": yesterday for name in stale})
    for name in fresh:
        register.prepare(client, stores.ARTIFACTS, name)
    client.zadd(register.PENDING, dict.fromkeys(MALFORMED + UNKNOWN, 0))
    store = stores.at(stores.ARTIFACTS, settings)
    if store is not None:
        store.put(names[1:])
    odd = len(MALFORMED + UNKNOWN)
    return Seeded("direct uploads", total + odd, len(stale) + odd)
