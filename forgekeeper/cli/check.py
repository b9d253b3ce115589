"""`check`: whether servers, schema, settings and places fit the batches."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

import peewee as pw
import redis
import typer
from redis.exceptions import NoPermissionError

from forgekeeper.api.batches import BATCHES, queues
from forgekeeper.audit import acts
from forgekeeper.cli.check_buckets import stores
from forgekeeper.cli.check_contract import contract
from forgekeeper.cli.check_others import others
from forgekeeper.cli.check_places import Finding, error, ok, repositories, sentinels, warning
from forgekeeper.cli.connection import configured, recorded, require_redis, sentence
from forgekeeper.cli.grants import DELETING, Process, needs_of
from forgekeeper.cli.holding import FIRST, hold_new, name_deleting
from forgekeeper.cli.migrate import FORBIDDEN, OURS
from forgekeeper.cli.terminal import FAILED, Json, emit, err, out, wrong_use
from forgekeeper.delivery.queues import types
from forgekeeper.guards import preconditions
from forgekeeper.guards.register_epoch import accept_redis, forget_epochs, why_register_is_lost
from forgekeeper.ledger.processes import version
from forgekeeper.platform import installation, migrations
from forgekeeper.platform.connections import Limits, client, connect
from forgekeeper.platform.coordination.values import DECLARED, misfits
from forgekeeper.platform.database import Base, database, definers, relations, release, schema, sqlstate, writes
from forgekeeper.platform.database.naming import relation_name
from forgekeeper.platform.installation import UNDEFINED_TABLE, Installation, claim, claim_by_writing, conflict, owner
from forgekeeper.platform.settings import Settings
from forgekeeper.platform.settings.reading import places
from metrics.logs import clean

POSTGRES, REDIS = 150_000, (6, 2)
"""Oldest server versions that the tests run against."""
ASKING = (*DELETING, Process.CONSOLE)
"""Processes that may ask Redis for every key."""
COLORS = {"ok": "green", "warning": "yellow", "error": "red"}


def check(
    *,
    init: Annotated[
        bool, typer.Option("--init", help="Create missing sentinels, adopt those that name nobody.")
    ] = False,
    moved: Annotated[
        bool, typer.Option("--moved", help="With --init: the database is the installation's, in a new place.")
    ] = False,
    copied: Annotated[
        bool,
        typer.Option("--copied", help="With --init: the database is a copy; it becomes another installation, held."),
    ] = False,
    redis_replaced: Annotated[
        bool,
        typer.Option(
            "--redis-replaced", help="With --init: the entries of the lost Redis are gone; begin in this one."
        ),
    ] = False,
    reason: Annotated[
        str | None,
        typer.Option(help="With --moved, --copied or --redis-replaced: how it came about; the audit keeps it."),
    ] = None,
    process: Annotated[
        Process, typer.Option("--as", help="Judge rights and servers by what this process needs.")
    ] = Process.PERSON,
    watch: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, help="Look for so long whether another program deletes what is due."),
    ] = None,
    json: Json = False,
) -> None:
    """Check settings, servers, schema, schedules, repositories and object stores.

    One line each: ok, warning or error.  Exit status 1 if there is an error.  With the role and the user of a process
    say --as which it is: then nothing counts as missing that it does not need.

    A database that was moved, or is a copy of another installation's, blocks all batches until you say which it is,
    as the owner of the tables: --init --moved or --init --copied.

    A Redis that was emptied, or is another one, blocks the batch whose register was in it: name the right one, or say
    --init --redis-replaced.
    """
    reason = (reason or "").strip() or None
    said = moved or copied or redis_replaced
    if (moved and copied) or said != bool(reason) or (said and not init):
        options = "--moved or --copied, not both, or --redis-replaced"
        wrong_use(f"{options} needs --init, and --reason to say how it came about")
    settings = configured()
    connect(settings, Limits.of_worker(settings), name="check", connections=1)
    with recorded(settings):
        try:
            if redis_replaced:
                _accept_replaced_redis(str(reason))
            place_reason = reason if moved or copied else None
            found = list(findings(settings, process, init=init, copied=copied, reason=place_reason))
            if watch is not None and not _errors(found):
                found += others(partial(time.sleep, watch))
        finally:
            release()
    _print_findings(found, json=json)
    if _errors(found):
        raise typer.Exit(FAILED)


def _errors(found: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.level == "error"]


def _print_findings(found: Sequence[Finding], *, json: bool) -> None:
    if json:
        emit({"ok": not _errors(found), "findings": [finding._asdict() for finding in found]})
        return
    for level, subject, message in found:
        out.print(f"{level:8}", style=COLORS[level], end="")
        out.print(f"{subject}: {clean(message)}")


def _accept_replaced_redis(reason: str) -> None:
    """Connect, and restart each register with lost entries in this Redis. Raises `Problem`."""
    database.connect(reuse_if_open=True)
    require_redis()
    if not accept_redis(reason):
        err.print("nothing to accept: Redis has the register, or no run has used one yet")


def findings(
    settings: Settings,
    process: Process = Process.PERSON,
    *,
    init: bool = False,
    copied: bool = False,
    reason: str | None = None,
) -> Iterator[Finding]:
    """Yield the findings in the order of the report; changes nothing unless *init*.

    The process must be pointed at its servers, which may be away. The caller has to release the connection.
    """
    yield ok("settings", f"all names are known and all values fit: {places(settings)}")
    yield ok("forgekeeper", f"version {version()}")
    if (what := settings.tls_unverified) != "nothing":
        yield warning("tls", f"FORGEKEEPER_TLS_UNVERIFIED is {what}: what answers there may be another server")
    yield from _schedules(settings)
    yield from _redis(process)
    ours: str | None = None
    try:
        database.connect(reuse_if_open=True)
    except pw.OperationalError as refused:
        yield error("postgresql", clean(str(refused).strip().splitlines()[0]))
    else:
        yield from _postgresql(settings, process)
        if process is not Process.SCHEDULER:
            yield from _clocks(settings)
        elsewhere = _place(copied=copied, reason=reason)
        # A copy of a database must not claim Redis or stores.
        init = init and elsewhere is None
        ours, finding = _installation(init=init, asks_redis=process is not Process.EXPORTER)
        yield elsewhere or finding
        if process in ASKING:
            yield from _registers()
    if process in DELETING:
        yield _git()
        yield from repositories(settings, ours, init=init)
        yield from stores(settings, ours, init=init)
    elif process is not Process.SCHEDULER:
        yield from sentinels(settings, ours)


def _schedules(settings: Settings) -> Iterator[Finding]:
    if off := [name for name in BATCHES if settings.cron(name) is None]:
        yield warning("schedules", f"off: {', '.join(off)}; they run only when sent by hand")
    else:
        yield ok("schedules", "every batch has one")
    for one in BATCHES.values():
        if one.writes is not None:
            yield warning("batches", f"{one.name} writes by itself ({one.writes}): no limit, stop or audit holds that")


def _redis(process: Process) -> Iterator[Finding]:
    try:
        try:
            yield from _redis_server(client.info())
        except NoPermissionError:
            seen = "version 6.2 or newer, maxmemory_policy:noeviction and aof_enabled:1"
            yield warning("redis", f"its user may not run INFO: grant it +info, or see to it that INFO says {seen}")
        if process is not Process.EXPORTER and (whose := owner(client)) is not None:
            claim_by_writing(client, whose)
        if process in ASKING:
            yield from (error("redis", said) for batch in BATCHES.values() for said in batch.misreadings())
            yield from (error("redis", clean(said)) for said in misfits(client, DECLARED | types(queues())))
    except redis.RedisError as refused:
        yield error("redis", sentence(refused) or clean(str(refused)))


def _redis_server(info: Mapping[str, Any]) -> Iterator[Finding]:
    version = str(info["redis_version"])
    yield _new_enough("redis", version, tuple(int(part) for part in version.split(".")[:2]) >= REDIS, "6.2")
    if (policy := info.get("maxmemory_policy")) != "noeviction":
        yield warning("redis", f"maxmemory-policy is {policy}: messages may be evicted; set noeviction")
    if not info.get("aof_enabled"):
        yield warning("redis", "append-only file is off: a restart forgets pending uploads; set appendonly yes")


def _new_enough(subject: str, version: str, new: bool, needed: str) -> Finding:
    return ok(subject, f"version {version}") if new else error(subject, f"version {version}, needs {needed} or newer")


def _postgresql(settings: Settings, process: Process) -> Iterator[Finding]:
    number = database.connection().server_version
    yield _new_enough("postgresql", f"{number // 10_000}.{number % 10_000}", number >= POSTGRES, "15")
    for refused in filter(None, (writes.why_refused(prove=True), preconditions.why_text_is_refused())):
        yield error("postgresql", refused)
    used = tuple(dict.fromkeys((*OURS, *(one.model for batch in BATCHES.values() for one in batch.relations))))
    if hidden := list(schema.closed(used)):
        yield from (error("privileges", said) for said in hidden)
        return
    lists = process is not Process.EXPORTER
    wanted: dict[type[Base] | str, list[str]] = {schema.MIGRATIONS: ["select"]} if lists else {}
    wanted |= {model: needs_of(model, process) for model in OURS}
    tables = relations.look([schema.MIGRATIONS, *map(relation_name, OURS)])
    lacking = list(relations.lacking(wanted, tables))
    yield from (error("privileges", said) for said in lacking)
    if any(schema.MIGRATIONS in said for said in lacking):
        return
    if lists and (pending := migrations.pending(database.obj)):
        said = "there are no tables of forgekeeper's yet" if FIRST in pending else f"pending: {', '.join(pending)}"
        yield error("schema", f"{said}; run `forgekeeper migrate`, as the owner of the tables")
        return
    found = [(one.sentence, one.harmless) for one in schema.differences(OURS)]
    found += [(sentence, False) for sentence in preconditions.misread(OURS, tables)]
    yield from ((warning if harmless else error)("schema", sentence) for sentence, harmless in found)
    if not lacking and not found:
        yield ok("schema", "forgekeeper's own tables are as they should be")
    # A forge that creates its tables in our schema has rights there.
    yield from (warning("privileges", said) for said in definers.objections_to_functions(settings.own_schema))
    yield from (error("privileges", said) for said in definers.objections_to_views(settings.forge_schema))
    yield from contract(settings, process)


def _clocks(settings: Settings) -> Iterator[Finding]:
    """Compare the clocks if all of them answer."""
    try:
        apart = [one for one in preconditions.differences() if one.exceeds(settings.clock_tolerance)]
    except (pw.PeeweeException, redis.RedisError):
        return  # reported elsewhere
    for difference in apart:
        yield (error if difference.reference == "redis" else warning)("clocks", difference.sentence())
    if not apart:
        yield ok("clocks", "PostgreSQL's, Redis's and this machine's agree")


def _place(*, copied: bool, reason: str | None) -> Finding | None:
    """Report a database that has moved; with a *reason* record its present place."""
    try:
        if reason is not None:
            with database.atomic():
                if (found := installation.settle(copied=copied)) is not None:
                    before, after = ({"installation": one.installation, "place": str(one.recorded)} for one in found)
                    act = f"check --init {'--copied' if copied else '--moved'}"
                    acts.record(act, "the installation", reason=reason, before=before, after=after)
                    if copied:
                        # A release of the original does not release its copy.
                        hold_new(name_deleting())
                        forget_epochs()
        said = installation.objection()
    except pw.PeeweeException as refused:
        if reason is None or sqlstate(refused) != FORBIDDEN:
            return None  # missing tables and missing rights are reported elsewhere
        said = "--moved and --copied are for the owner of the tables, as which you run `forgekeeper migrate`"
    except installation.Unknown as unknown:
        said = str(unknown)
    return error("installation", said) if said else None


def _installation(*, init: bool, asks_redis: bool) -> tuple[str | None, Finding]:
    """Report the installation of database and Redis; with *init* claim an unclaimed Redis."""
    try:
        ours = Installation.ensure()
        if not asks_redis:
            return ours, ok("installation", f"{ours}, in PostgreSQL")
        theirs = owner(client)
        if theirs is None and init:
            acts.record("check --init", "redis", after={"installation": ours})
            theirs = claim(client, ours)
    except pw.PeeweeException as refused:
        said = "the database does not say which it is of: see the lines above"
        if sqlstate(refused) == UNDEFINED_TABLE:
            said = "there is none yet: `forgekeeper migrate` makes it"
        return None, error("installation", said)
    except redis.RedisError:
        return ours, warning("installation", f"{ours}; Redis does not say which it is of")
    if theirs is None:
        said = "Redis is claimed when a worker, a scheduler or `forgekeeper check --init` starts"
        return ours, ok("installation", f"{ours}; {said}")
    if theirs != ours:
        return ours, error("installation", conflict(ours, theirs))
    return ours, ok("installation", f"{ours}, in PostgreSQL and Redis")


def _registers() -> Iterator[Finding]:
    """Report each register in Redis that has lost its entries."""
    with suppress(pw.PeeweeException, redis.RedisError):  # reported elsewhere
        for batch in BATCHES.values():
            if lost := why_register_is_lost(batch):
                yield error("redis", lost)


def _git() -> Finding:
    program = shutil.which("git")
    return ok("git", program) if program else warning("git", "there is no git on the PATH: no refs can be deleted")
