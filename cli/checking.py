"""`check`: look whether everything that the batches need is there, and what it should be."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import peewee as pw
import redis
import typer

import migrations
from cli.connection import configured
from cli.console import FAILED, Json, emit, out
from metrics.redaction import clean
from models import APPLICATION, OURS, Base, DeletedObject, JobArtifact, Project, database, release
from models.schema import differences
from settings import Settings
from settings.reading import places
from storage import sentinel
from storage.git_repository import RootUnavailable, is_missing, misnamed, too_many_missing
from workers import BATCHES, clocks
from workers.clients import Limits, client, connect

POSTGRES, REDIS = 150_000, (6, 2)
"""The oldest servers that the tests run against."""
SAMPLE = 50
"""So many projects are looked for."""


class Finding(NamedTuple):
    """One line of the report."""

    subject: str
    level: Literal["ok", "warning", "error"]
    message: str


def check(
    init: Annotated[bool, typer.Option("--init", help="Create missing sentinels.")] = False, json: Json = False
) -> None:
    """Check settings, servers, schema, schedules, repositories and object stores.

    One line each: ok, warning or error.  Exit status 1 if there is an error.
    """
    settings = configured()
    findings = list(_findings(settings, init=init))
    errors = [finding for finding in findings if finding.level == "error"]
    if json:
        emit({"ok": not errors, "findings": [finding._asdict() for finding in findings]})
    else:
        colors = {"ok": "green", "warning": "yellow", "error": "red"}
        for subject, level, message in findings:
            out.print(f"{level:8}", style=colors[level], end="")
            out.print(f"{subject}: {message}")
    if errors:
        raise typer.Exit(FAILED)


def _findings(settings: Settings, *, init: bool) -> Iterator[Finding]:
    yield Finding("settings", "ok", f"all names are known and all values fit: {places(settings)}")
    yield from _schedules(settings)
    connect(settings, Limits.of_worker(settings), name="check", connections=1)
    yield from _redis()
    try:
        database.connect()
    except pw.OperationalError as error:
        yield Finding("postgresql", "error", clean(str(error).strip().splitlines()[0]))
    else:
        yield from _postgresql()
        yield from _clocks(settings)
    try:
        yield from _git()
        yield from _repositories(settings, init=init)
        yield from _stores(settings, init=init)
    finally:
        release()


def _schedules(settings: Settings) -> Iterator[Finding]:
    off = [name for name in BATCHES if settings.cron(name) is None]
    if off:
        yield Finding("schedules", "warning", f"off: {', '.join(off)}; they run only when sent by hand")
    else:
        yield Finding("schedules", "ok", "every batch has one")


def _redis() -> Iterator[Finding]:
    try:
        server = client.info("server")
        policy = client.info("memory").get("maxmemory_policy", "unknown")
        persistent = client.info("persistence").get("aof_enabled")
    except redis.RedisError as error:
        yield Finding("redis", "error", clean(str(error)))
        return
    version = str(server["redis_version"])
    old = tuple(int(part) for part in version.split(".")[:2]) < REDIS
    yield Finding("redis", "error" if old else "ok", f"version {version}" + (", needs 6.2 or newer" if old else ""))
    if policy != "noeviction":
        yield Finding("redis", "warning", f"maxmemory-policy is {policy}: messages may be evicted; set noeviction")
    if not persistent:
        yield Finding(
            "redis", "warning", "append-only file is off: a restart forgets pending uploads; set appendonly yes"
        )


def _postgresql() -> Iterator[Finding]:
    number = database.connection().server_version
    old = number < POSTGRES
    version = f"version {number // 10_000}.{number % 10_000}"
    yield Finding("postgresql", "error" if old else "ok", version + (", needs 15 or newer" if old else ""))
    pending = migrations.pending(database.obj)
    if pending:
        yield Finding("schema", "error", f"pending: {', '.join(pending)}; run `forgekeeper migrate`")
        return
    found = list(differences((*OURS, *APPLICATION)))
    for difference in found:
        yield Finding("schema", "warning" if difference.harmless else "error", difference.sentence)
    if not found:
        yield Finding("schema", "ok", "all tables, columns and indexes are there")


def _clocks(settings: Settings) -> Iterator[Finding]:
    """Compare the clocks, where all of them can be asked; who cannot be is named already."""
    try:
        differences = list(clocks.read().differences())
    except (pw.PeeweeException, redis.RedisError):
        return
    apart = [difference for difference in differences if difference.exceeds(settings.clock_tolerance)]
    for difference in apart:
        blocks = difference.reference == "redis"
        yield Finding("clocks", "error" if blocks else "warning", difference.sentence())
    if not apart:
        most = max(abs(difference.seconds) for difference in differences)
        yield Finding("clocks", "ok", f"PostgreSQL's, Redis's and this machine's are {most:.1f} s apart at most")


def _repositories(settings: Settings, *, init: bool) -> Iterator[Finding]:
    root = settings.repositories_root
    if root is None:
        yield Finding("repositories", "warning", "FORGEKEEPER_REPOSITORIES_ROOT is not set: no refs can be deleted")
        return
    try:
        yield _sentinel("repositories", sentinel.Folder(root), init=init, known=(Project,))
        yield from _sample(root, settings.missing_repositories)
    except (sentinel.Unreadable, RootUnavailable) as error:
        yield Finding("repositories", "error", str(error))


def _sample(root: Path, share: float) -> Iterator[Finding]:
    """Look for the repositories of projects taken at random; say what is wrong with where they should be."""
    try:
        projects = Project.sample(SAMPLE)
    except pw.PeeweeException:
        return  # that there is no database, or no such table, is said elsewhere
    missing = {number: path for number, path in projects.items() if is_missing(root, path)}
    others = {path: other for path in missing.values() if (other := misnamed(root, path))}
    for path, other in list(others.items())[:1]:
        yield Finding("repositories", "error", f"there is none at {path}, but one at {other}: correct disk_path")
    if len(missing) > len(others):
        level: Literal["warning", "error"] = (
            "error" if too_many_missing(len(missing), len(projects), share) else "warning"
        )
        yield Finding("repositories", level, f"{len(missing)} of {len(projects)} projects taken at random have none")


def _git() -> Iterator[Finding]:
    program = shutil.which("git")
    if program is None:
        yield Finding("git", "warning", "there is no git on the PATH: no refs can be deleted")
        return
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    yield Finding("git", "ok", said.stdout.strip().removeprefix("git "))


def _stores(settings: Settings, *, init: bool) -> Iterator[Finding]:
    if not settings.object_stores:
        yield Finding("object stores", "warning", "FORGEKEEPER_OBJECT_STORES is not set: no objects can be deleted")
    for location, url in settings.object_stores.items():
        try:
            place = sentinel.Store(location, url.get_secret_value())
            yield _sentinel("object store", place, init=init, known=(JobArtifact, DeletedObject))
        except sentinel.Unreadable as error:
            yield Finding("object store", "error", clean(str(error)))


def _sentinel(subject: str, place: sentinel.Place, *, init: bool, known: tuple[type[Base], ...]) -> Finding:
    """Report on a place's sentinel; create a missing one if asked to, unless the place looks wrong."""
    if place.has_sentinel():
        return Finding(subject, "ok", f"{place} has its sentinel")
    if not init:
        return Finding(subject, "error", f"{place} has no {sentinel.NAME}; `forgekeeper check --init` creates it")
    if place.is_empty() and any(_exists(model) for model in known):
        reason = "is empty, but the database knows what should be in it: is the right disk or bucket there?"
        return Finding(subject, "error", f"{place} {reason}")
    place.create_sentinel()
    return Finding(subject, "ok", f"{place} had no {sentinel.NAME}; created it")


def _exists(model: type[Base]) -> bool:
    """Say whether the database knows any of these; one that cannot be asked is taken to."""
    try:
        return model.select().exists()
    except pw.PeeweeException:
        return True
