"""`check`: look whether everything that the batches need is there, and what it should be."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import peewee as pw
import redis
import typer
from redis.exceptions import NoPermissionError

from forgekeeper import clocks, migrations
from forgekeeper.audit import acts
from forgekeeper.batches import BATCHES, queues
from forgekeeper.cli.connection import configured, recorded
from forgekeeper.cli.console import FAILED, Json, emit, out, wrong_use
from forgekeeper.cli.failures import sentence
from forgekeeper.cli.releasing import FIRST
from forgekeeper.connections import Limits, client, connect
from forgekeeper.database import Base, database, privileges, release, sqlstate
from forgekeeper.database.schema import differences
from forgekeeper.database.schema_guard import misread
from forgekeeper.delivery.keys import NAMESPACE, names, type_of
from forgekeeper.installation import place
from forgekeeper.installation.agreement import UNDEFINED_TABLE, conflict
from forgekeeper.installation.in_redis import claim, claim_by_writing, owner
from forgekeeper.installation.row import Installation
from forgekeeper.process.presence import version
from forgekeeper.redis_types import DECLARED, misfits
from forgekeeper.settings import Settings
from forgekeeper.settings.reading import places
from forgekeeper.storage import sentinel
from forgekeeper.storage.git_command import legible
from forgekeeper.storage.git_repository import RootUnavailable, is_missing, misnamed, objection, too_many_missing
from forgekeeper.storage.objects import OUTSIDE, is_below, is_normal
from forgekeeper.tables import OURS
from metrics.redaction import clean

Named = Callable[[], list[tuple[str, ...]]]
"""Names some things that should be at a place, each by the paths at which it may lie."""
POSTGRES, REDIS = 150_000, (6, 2)
"""The oldest servers that the tests run against."""
UNSEEN = (
    "maxmemory-policy and appendonly cannot be seen: its user may not run INFO; grant it +info, or see to it as another"
    " user that `redis-cli INFO` says maxmemory_policy:noeviction and aof_enabled:1"
)
FORBIDDEN = "42501"
SAMPLE = 50
"""So many projects are looked for."""


class Settled(NamedTuple):
    """What a person says of a database that is not where it was, and why."""

    copied: bool
    reason: str


class Finding(NamedTuple):
    """One line of the report."""

    subject: str
    level: Literal["ok", "warning", "error"]
    message: str


def check(
    init: Annotated[
        bool, typer.Option("--init", help="Create missing sentinels, adopt those that name nobody.")
    ] = False,
    moved: Annotated[
        bool, typer.Option("--moved", help="With --init: the database is the installation's, in a new place.")
    ] = False,
    copied: Annotated[
        bool, typer.Option("--copied", help="With --init: the database is a copy; it becomes another installation.")
    ] = False,
    reason: Annotated[
        str | None, typer.Option(help="With --moved or --copied: how it came about; the audit keeps it.")
    ] = None,
    json: Json = False,
) -> None:
    """Check settings, servers, schema, schedules, repositories and object stores.

    One line each: ok, warning or error.  Exit status 1 if there is an error.

    A database that was moved, or is a copy of another installation's, blocks all batches until you say which it is,
    as the owner of the tables: --init --moved or --init --copied.
    """
    _usable(init=init, moved=moved, copied=copied, reason=reason)
    settings = configured()
    with recorded(settings):
        found = _findings(settings, init=init, settled=Settled(copied, reason) if reason else None)
        findings = list(found)
    errors = [finding for finding in findings if finding.level == "error"]
    if json:
        emit({"ok": not errors, "findings": [finding._asdict() for finding in findings]})
    else:
        colors = {"ok": "green", "warning": "yellow", "error": "red"}
        for subject, level, message in findings:
            out.print(f"{level:8}", style=colors[level], end="")
            out.print(f"{subject}: {clean(message)}")
    if errors:
        raise typer.Exit(FAILED)


def _usable(*, init: bool, moved: bool, copied: bool, reason: str | None) -> None:
    if moved and copied:
        wrong_use("--moved or --copied: it cannot be both")
    if moved or copied:
        if not init:
            wrong_use("--moved and --copied need --init")
        if not (reason or "").strip():
            wrong_use("say with --reason how it came about: the audit keeps it")
    elif reason is not None:
        wrong_use("--reason is for --moved and --copied")


def _findings(settings: Settings, *, init: bool, settled: Settled | None) -> Iterator[Finding]:
    yield Finding("settings", "ok", f"all names are known and all values fit: {places(settings)}")
    yield Finding("forgekeeper", "ok", f"version {version()}")
    if settings.tls_unverified != "nothing":
        said = f"FORGEKEEPER_TLS_UNVERIFIED is {settings.tls_unverified}"
        yield Finding("tls", "warning", f"{said}: whoever answers there may be somebody else")
    yield from _schedules(settings)
    connect(settings, Limits.of_worker(settings), name="check", connections=1)
    yield from _redis()
    ours: str | None = None
    try:
        database.connect()
    except pw.OperationalError as error:
        yield Finding("postgresql", "error", clean(str(error).strip().splitlines()[0]))
    else:
        yield from _postgresql()
        yield from _clocks(settings)
        elsewhere = _place(settled)
        # In a place that may be a copy's nothing is claimed.
        init = init and elsewhere is None
        ours, finding = _installation(init=init)
        yield elsewhere or finding
    try:
        yield from _git()
        yield from _repositories(settings, ours, init=init)
        yield from _stores(settings, ours, init=init)
    finally:
        release()


def _schedules(settings: Settings) -> Iterator[Finding]:
    off = [name for name in BATCHES if settings.cron(name) is None]
    if off:
        yield Finding("schedules", "warning", f"off: {', '.join(off)}; they run only when sent by hand")
    else:
        yield Finding("schedules", "ok", "every batch has one")
    for one in BATCHES.values():
        if one.writes is not None:
            said = f"{one.name} writes by itself ({one.writes}): no limit, stop or audit holds that"
            yield Finding("batches", "warning", said)


def _redis() -> Iterator[Finding]:
    try:
        version = _redis_version()
        old = tuple(int(part) for part in version.split(".")[:2]) < REDIS
        yield Finding("redis", "error" if old else "ok", f"version {version}" + (", needs 6.2 or newer" if old else ""))
        try:
            yield from _redis_settings()
        except NoPermissionError:
            yield Finding("redis", "warning", UNSEEN)
        if (whose := owner(client)) is not None:
            claim_by_writing(client, whose)
        said = (sentence for batch in BATCHES.values() for sentence in batch.misreadings())
        yield from (Finding("redis", "error", sentence) for sentence in said)
        types = DECLARED | {name: type_of(name) for name in names(NAMESPACE, queues())}
        yield from (Finding("redis", "error", clean(sentence)) for sentence in misfits(client, types))
    except redis.RedisError as error:
        yield Finding("redis", "error", sentence(error) or clean(str(error)))


def _redis_version() -> str:
    """Ask for the version in the way that no user can be refused."""
    answer: Any = client.execute_command("HELLO")
    said = answer if isinstance(answer, dict) else dict(zip(answer[::2], answer[1::2], strict=True))
    return str(next(value.decode() for name, value in said.items() if name in {b"version", "version"}))


def _redis_settings() -> Iterator[Finding]:
    policy = client.info("memory").get("maxmemory_policy", "unknown")
    if policy != "noeviction":
        yield Finding("redis", "warning", f"maxmemory-policy is {policy}: messages may be evicted; set noeviction")
    if not client.info("persistence").get("aof_enabled"):
        yield Finding(
            "redis", "warning", "append-only file is off: a restart forgets pending uploads; set appendonly yes"
        )


def _postgresql() -> Iterator[Finding]:
    number = database.connection().server_version
    old = number < POSTGRES
    version = f"version {number // 10_000}.{number % 10_000}"
    yield Finding("postgresql", "error" if old else "ok", version + (", needs 15 or newer" if old else ""))
    tables = _tables()
    hidden = list(privileges.closed(tables))
    if hidden:
        yield from (Finding("privileges", "error", sentence) for sentence in hidden)
        return
    lacking = list(privileges.lacking(tables))
    yield from (Finding("privileges", "error", sentence) for sentence in lacking)
    readable = not any(privileges.MIGRATIONS in sentence for sentence in lacking)
    if pending := migrations.pending(database.obj) if readable else []:
        first = FIRST in pending
        said = "there are no tables of forgekeeper's yet" if first else f"pending: {', '.join(pending)}"
        yield Finding("schema", "error", f"{said}; run `forgekeeper migrate`, as the owner of the tables")
        return
    if not lacking:
        yield Finding("privileges", "ok", "everything that the batches do is granted")
    yield from _schema(tables)


def _schema(tables: Sequence[type[Base]]) -> Iterator[Finding]:
    """Report what the tables lack, and what the batches would misread in them."""
    found = list(differences(tables))
    for difference in found:
        yield Finding("schema", "warning" if difference.harmless else "error", difference.sentence)
    misreadings = list(misread(tables))
    yield from (Finding("schema", "error", sentence) for sentence in misreadings)
    if not found and not misreadings:
        yield Finding("schema", "ok", "all tables, columns and indexes are there")


def _tables() -> tuple[type[Base], ...]:
    """Return our own tables, and those that the batches declare."""
    declared = (table for batch in BATCHES.values() for table in batch.tables)
    return tuple(dict.fromkeys((*OURS, *declared)))


def _clocks(settings: Settings) -> Iterator[Finding]:
    """Compare the clocks, where all of them can be asked; who cannot be is named already."""
    try:
        differences = clocks.differences()
    except (pw.PeeweeException, redis.RedisError):
        return
    apart = [difference for difference in differences if difference.exceeds(settings.clock_tolerance)]
    for difference in apart:
        blocks = difference.reference == "redis"
        yield Finding("clocks", "error" if blocks else "warning", difference.sentence())
    if not apart:
        most = max(abs(difference.seconds) for difference in differences)
        yield Finding("clocks", "ok", f"PostgreSQL's, Redis's and this machine's are {most:.1f} s apart at most")


def _place(settled: Settled | None) -> Finding | None:
    """Report a database that is not where the installation was last; record where it is if a person has said so."""
    try:
        if settled is not None:
            _settle(settled)
        said = place.objection()
    except pw.PeeweeException as error:
        if settled is None or sqlstate(error) != FORBIDDEN:
            return None  # that the table is missing, or may not be read, is said elsewhere
        said = "--moved and --copied are for the owner of the tables, as which you run `forgekeeper migrate`"
    except place.Unknown as error:
        said = str(error)
    return Finding("installation", "error", said) if said else None


def _settle(settled: Settled) -> None:
    with database.atomic():
        found = place.settle(copied=settled.copied)
        if found is not None:
            before, after = ({"installation": one.installation, "place": str(one.recorded)} for one in found)
            act = f"check --init {'--copied' if settled.copied else '--moved'}"
            acts.record(act, "the installation", reason=settled.reason, before=before, after=after)


def _installation(*, init: bool) -> tuple[str | None, Finding]:
    """Report whose database and Redis these are; claim a Redis that is nobody's if asked to."""
    try:
        ours = Installation.ensure()
        theirs = owner(client)
        if theirs is None and init:
            acts.record("check --init", "redis", after={"installation": ours})
            theirs = claim(client, ours)
    except pw.PeeweeException as error:
        said = "the database does not say which it is of: see the lines above"
        if sqlstate(error) == UNDEFINED_TABLE:
            said = "there is none yet: `forgekeeper migrate` makes it"
        return None, Finding("installation", "error", said)
    except redis.RedisError:
        return ours, Finding("installation", "warning", f"{ours}; Redis does not say which it is of")
    if theirs is None:
        told = "Redis is told when a worker, a scheduler or `forgekeeper check --init` starts"
        return ours, Finding("installation", "ok", f"{ours}; {told}")
    if theirs != ours:
        return ours, Finding("installation", "error", conflict(ours, theirs))
    return ours, Finding("installation", "ok", f"{ours}, in PostgreSQL and Redis")


def _repositories(settings: Settings, ours: str | None, *, init: bool) -> Iterator[Finding]:
    root = settings.repositories_root
    if root is None:
        yield Finding("repositories", "warning", "FORGEKEEPER_REPOSITORIES_ROOT is not set: no refs can be deleted")
        return
    try:
        found = _sentinel("repositories", sentinel.Folder(root), ours, init=init, named=_repositories_named)
        yield found
        # What a wrong place lacks is no news.
        if found.level != "error":
            yield from _sample(root, settings.missing_repositories)
    except (sentinel.Unreadable, RootUnavailable) as error:
        yield Finding("repositories", "error", str(error))


def _sample(root: Path, share: float) -> Iterator[Finding]:
    """Look for the repositories of projects taken at random; say what is wrong with where they should be."""
    try:
        projects = _projects()
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
    refused = {number: said for number, path in projects.items() if (said := objection(root, path))}
    for number, said in list(refused.items())[:1]:
        most = "" if len(refused) == 1 else f" ({len(refused)} of {len(projects)} projects taken at random are refused)"
        where = legible(projects[number].encode(errors="backslashreplace"))
        yield Finding("repositories", "error", f"no ref of project {number} at {where!r} is deleted: {said}{most}")


def _git() -> Iterator[Finding]:
    program = shutil.which("git")
    if program is None:
        yield Finding("git", "warning", "there is no git on the PATH: no refs can be deleted")
        return
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    yield Finding("git", "ok", said.stdout.strip().removeprefix("git "))


def _stores(settings: Settings, ours: str | None, *, init: bool) -> Iterator[Finding]:
    if not settings.object_stores:
        yield Finding("object stores", "warning", "FORGEKEEPER_OBJECT_STORES is not set: no objects can be deleted")
    for location, url in settings.object_stores.items():
        try:
            place = sentinel.Store(location, url.get_secret_value())
            named = partial(_objects_named, location)
            yield _sentinel("object store", place, ours, init=init, named=named)
            yield from _prefixes(location, settings.object_prefixes.get(location, ()), named)
        except sentinel.Unreadable as error:
            yield Finding("object store", "error", clean(str(error)))


def _prefixes(location: str, prefixes: tuple[str, ...], named: Named) -> Iterator[Finding]:
    """Say where in the store objects may be deleted, and whether the database names some that may not."""
    if not prefixes:
        hint = "FORGEKEEPER_OBJECT_PREFIXES names the folders outside which nothing is, if you know them"
        yield Finding("object prefixes", "ok", f"{location}: objects are deleted anywhere in the store; {hint}")
        return
    try:
        names = [paths[0] for paths in named()]
    except (pw.PeeweeException, redis.RedisError):
        return  # that they do not answer is said elsewhere
    outside = [path for path in names if not is_below(prefixes, path)]
    if outside:
        yield Finding(
            "object prefixes",
            "warning",
            f"{location}: {len(outside)} of {len(names)} objects looked for, such as {outside[0]}, are {OUTSIDE}: "
            "they will not be deleted",
        )
    else:
        yield Finding("object prefixes", "ok", f"{location}: objects are deleted below {', '.join(prefixes)} alone")


def _sentinel(subject: str, place: sentinel.Place, ours: str | None, *, init: bool, named: Named) -> Finding:
    """Report on a place's sentinel; if asked to, create a missing one or adopt one that names nobody.

    Only once the place is proved to be the right one, by a sample of what the database has *named*.
    """
    found = place.sentinel()
    if found is not None and ours is None:
        return Finding(subject, "warning", f"{place} has its sentinel, but nobody can say whether it is the right one")
    if found is not None and found.installation == ours:
        return Finding(subject, "ok", f"{place} has its sentinel")
    if found is None and (not init or ours is None):
        said = "`forgekeeper check --init` creates it"
        if ours is None:
            said = "it gets none while the database does not say which installation it is of: see the lines above"
        return Finding(subject, "error", f"{place} has no {sentinel.NAME}; {said}")
    assert ours is not None
    if found is not None and (found.installation is not None or not init):
        return Finding(subject, "error", sentinel.objection(place, found, ours) or "")
    doubt = _doubt(place, ours, named) or _unrecorded(subject, place, ours, adopted=found is not None)
    if doubt is not None:
        return Finding(subject, "error", f"{place} {doubt}")
    place.create_sentinel(ours)
    done = f"had no {sentinel.NAME}; created it" if found is None else f"had a {sentinel.NAME} of nobody's; adopted it"
    return Finding(subject, "ok", f"{place} {done}")


def _doubt(place: sentinel.Place, ours: str, named: Named) -> str | None:
    """Say why a place may be the wrong one, None when it is empty as it should be or has what it should have."""
    try:
        names = named()
    except (pw.PeeweeException, redis.RedisError) as error:
        return f"may be the wrong place: what should be in it cannot be asked for: {clean(str(error).splitlines()[0])}"
    if place.is_empty():
        return (
            "is empty, but the database knows what should be in it: is the right disk or bucket there?"
            if names
            else None
        )
    if not names:
        sure = f"whoever is sure writes the line `installation: {ours}` into its {sentinel.NAME}"
        return f"is not empty, and the database knows of nothing in it: is it the right one? ({sure})"
    if any(place.has(path) for paths in names for path in paths):
        return None
    tried = f"has none of the {len(names)} things looked for that should be in it"
    return f"{tried}: is it the right disk or bucket, and the right database?"


def _unrecorded(subject: str, place: sentinel.Place, ours: str, *, adopted: bool) -> str | None:
    """Record that the place gets its sentinel; say why that cannot be."""
    try:
        acts.record("check --init", f"{subject} {place}", after={"installation": ours, "adopted": adopted})
    except pw.PeeweeException as error:
        return f"gets no {sentinel.NAME}, for that cannot be recorded: {sentence(error)}"
    return None


def _repositories_named() -> list[tuple[str, ...]]:
    """Name repositories that should be below the root; whether their paths are spelled rightly is another question."""
    return [(path.removesuffix(".git"), f"{path.removesuffix('.git')}.git") for path in _projects().values()]


def _projects() -> dict[int, str]:
    """Return some projects, and where their repositories should be."""
    looks = [look for batch in BATCHES.values() for look in batch.known_repositories]
    return {number: path for look in looks for number, path in look(SAMPLE).items()}


def _objects_named(location: str) -> list[tuple[str, ...]]:
    """Name objects that should be at the location."""
    paths = [path for batch in BATCHES.values() for look in batch.known_objects for path in look(location)]
    return [(path,) for path in paths if is_normal(path)]
