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

from forgekeeper.api.batches import BATCHES, list_queues
from forgekeeper.audit import acts
from forgekeeper.cli.check_buckets import check_stores
from forgekeeper.cli.check_contract import check_forge_tables
from forgekeeper.cli.check_others import watch_other_programs
from forgekeeper.cli.check_places import Finding, check_repositories, check_sentinels, error, ok, warning
from forgekeeper.cli.check_session import check_session
from forgekeeper.cli.connection import describe_with_remedy, load_and_configure_logging, record_acts, require_redis
from forgekeeper.cli.grants import DELETING_PROCESSES, ProcessRole, list_privileges
from forgekeeper.cli.holding import FIRST_MIGRATION, hold_new_batches, list_deleting_batches
from forgekeeper.cli.migrate import MISSING_RIGHT_SQLSTATE, OWN_TABLES
from forgekeeper.cli.terminal import FAILED_STATUS, Json, err, out, print_json, wrong_use
from forgekeeper.delivery.queues import required_key_types
from forgekeeper.guards import preconditions
from forgekeeper.guards.register_epoch import accept_redis, forget_epochs, why_register_is_lost
from forgekeeper.ledger.heartbeats import read_version
from forgekeeper.platform import installation, migrations
from forgekeeper.platform.connections import ServerTimeouts, client, configure_clients
from forgekeeper.platform.coordination.redis_values import KEY_TYPES, find_wrong_types
from forgekeeper.platform.database import (
    Base,
    database,
    definers,
    relations,
    release_connection,
    schema,
    sqlstate,
    writes,
)
from forgekeeper.platform.database.naming import relation_name
from forgekeeper.platform.installation import (
    UNDEFINED_TABLE,
    Installation,
    claim_by_writing,
    claim_redis,
    find_redis_owner,
    mismatch_message,
)
from forgekeeper.platform.settings import Settings
from forgekeeper.platform.settings.reading import show_servers
from metrics.logs import clean_text

MIN_POSTGRES_VERSION, MIN_REDIS_VERSION = 150_000, (6, 2)
"""Oldest server versions that the tests run against."""
PROCESSES_ASKING_REDIS = (*DELETING_PROCESSES, ProcessRole.CONSOLE)
"""Processes that may ask Redis for every key."""
LEVEL_COLORS = {"ok": "green", "warning": "yellow", "error": "red"}


def check(
    *,
    init: Annotated[
        bool, typer.Option("--init", help="Create missing sentinels; claim places and a Redis without an owner.")
    ] = False,
    moved: Annotated[
        bool, typer.Option("--moved", help="With --init: the database has moved, and belongs to the same installation.")
    ] = False,
    copied: Annotated[
        bool,
        typer.Option("--copied", help="With --init: the database is a copy; it becomes a new installation, held."),
    ] = False,
    redis_replaced: Annotated[
        bool,
        typer.Option(
            "--redis-replaced", help="With --init: the entries of the old Redis are lost; start with this Redis."
        ),
    ] = False,
    reason: Annotated[
        str | None,
        typer.Option(help="With --moved, --copied or --redis-replaced: the reason, for the audit."),
    ] = None,
    process: Annotated[
        ProcessRole, typer.Option("--as", help="Check only the rights and servers that this process needs.")
    ] = ProcessRole.PERSON,
    watch: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, help="Watch for this time whether another program deletes due records."),
    ] = None,
    json: Json = False,
) -> None:
    """Check settings, servers, schema, schedules, repositories and object stores.

    Each finding is a line: ok, warning or error.  Exit status 1 if there is an error.  If you check the role of a
    process, name the process with --as: then only the rights that it needs are reported as missing.

    A database that was moved or copied blocks all batches, until the owner of the tables runs --init --moved or --init
    --copied.

    An emptied or different Redis blocks the batch whose register was in it: name the right Redis, or run --init
    --redis-replaced.
    """
    reason = (reason or "").strip() or None
    said = moved or copied or redis_replaced
    if (moved and copied) or said != bool(reason) or (said and not init):
        wrong_use("use --init and --reason together with --moved or --copied, not both, or --redis-replaced")
    settings = load_and_configure_logging()
    configure_clients(settings, ServerTimeouts.for_worker(settings), name="check", connections=1)
    with record_acts(settings):
        try:
            if redis_replaced:
                _accept_replaced_redis(str(reason))
            place_reason = reason if moved or copied else None
            found = list(collect_findings(settings, process, init=init, copied=copied, reason=place_reason))
            if watch is not None and not _select_errors(found):
                found += watch_other_programs(partial(time.sleep, watch))
        finally:
            release_connection()
    _print_findings(found, json=json)
    if _select_errors(found):
        raise typer.Exit(FAILED_STATUS)


def _select_errors(found: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.level == "error"]


def _print_findings(found: Sequence[Finding], *, json: bool) -> None:
    if json:
        print_json({"ok": not _select_errors(found), "findings": [finding._asdict() for finding in found]})
        return
    for level, subject, message in found:
        out.print(f"{level:8}", style=LEVEL_COLORS[level], end="")
        out.print(f"{subject}: {clean_text(message)}")


def _accept_replaced_redis(reason: str) -> None:
    """Connect, and restart each register with lost entries in this Redis. Raises `Problem`."""
    database.connect(reuse_if_open=True)
    require_redis()
    if not accept_redis(reason):
        err.print("nothing to accept: Redis has the register, or no run has used one yet")


def collect_findings(
    settings: Settings,
    process: ProcessRole = ProcessRole.PERSON,
    *,
    init: bool = False,
    copied: bool = False,
    reason: str | None = None,
) -> Iterator[Finding]:
    """Yield the findings in the order of the report; changes nothing unless *init*.

    The process must be pointed at its servers, which may be away. The caller has to release the connection.
    """
    yield ok("settings", f"all names are known and all values are valid: {show_servers(settings)}")
    yield ok("forgekeeper", f"version {read_version()}")
    if (what := settings.tls_unverified) != "nothing":
        yield warning("tls", f"FORGEKEEPER_TLS_UNVERIFIED is {what}: another server may answer instead")
    yield from _check_schedules(settings)
    yield from _check_redis(process)
    ours: str | None = None
    try:
        database.connect(reuse_if_open=True)
    except pw.OperationalError as refused:
        yield error("postgresql", clean_text(str(refused).strip().splitlines()[0]))
    else:
        yield from check_session()
        yield from _check_postgresql(settings, process)
        if process is not ProcessRole.SCHEDULER:
            yield from _check_clocks(settings)
        elsewhere = _check_place(copied=copied, reason=reason)
        # A copy of a database must not claim Redis or stores.
        init = init and elsewhere is None
        ours, finding = _check_installation(init=init, asks_redis=process is not ProcessRole.EXPORTER)
        yield elsewhere or finding
        if process in PROCESSES_ASKING_REDIS:
            yield from _check_registers()
    if process in DELETING_PROCESSES:
        yield _check_git()
        yield from check_repositories(settings, ours, init=init)
        yield from check_stores(settings, ours, init=init)
    elif process is not ProcessRole.SCHEDULER:
        yield from check_sentinels(settings, ours)


def _check_schedules(settings: Settings) -> Iterator[Finding]:
    if off := [name for name in BATCHES if settings.schedule_of(name) is None]:
        yield warning("schedules", f"off: {', '.join(off)}; these batches run only when sent by hand")
    else:
        yield ok("schedules", "every batch has a schedule")
    for one in BATCHES.values():
        if one.writes is not None:
            yield warning("batches", f"{one.name} writes by itself ({one.writes}): no limit, stop or audit applies")


def _check_redis(process: ProcessRole) -> Iterator[Finding]:
    try:
        try:
            yield from _check_redis_server(client.info())
        except NoPermissionError:
            seen = "version 6.2 or newer, maxmemory_policy:noeviction and aof_enabled:1"
            yield warning("redis", f"the user may not run INFO: grant +info, or check yourself that INFO shows {seen}")
        if process is not ProcessRole.EXPORTER and (whose := find_redis_owner(client)) is not None:
            claim_by_writing(client, whose)
        if process in PROCESSES_ASKING_REDIS:
            yield from (error("redis", said) for batch in BATCHES.values() for said in batch.misreadings())
            yield from (
                error("redis", clean_text(said))
                for said in find_wrong_types(client, KEY_TYPES | required_key_types(list_queues()))
            )
    except redis.RedisError as refused:
        yield error("redis", describe_with_remedy(refused) or clean_text(str(refused)))


def _check_redis_server(info: Mapping[str, Any]) -> Iterator[Finding]:
    version = str(info["redis_version"])
    yield _check_version(
        "redis", version, tuple(int(part) for part in version.split(".")[:2]) >= MIN_REDIS_VERSION, "6.2"
    )
    if (policy := info.get("maxmemory_policy")) != "noeviction":
        yield warning("redis", f"maxmemory-policy is {policy}: messages may be evicted; set noeviction")
    if not info.get("aof_enabled"):
        yield warning("redis", "append-only file is off: a restart forgets pending uploads; set appendonly yes")


def _check_version(subject: str, version: str, new: bool, needed: str) -> Finding:
    return ok(subject, f"version {version}") if new else error(subject, f"version {version}, needs {needed} or newer")


def _check_postgresql(settings: Settings, process: ProcessRole) -> Iterator[Finding]:
    number = database.connection().server_version
    yield _check_version("postgresql", f"{number // 10_000}.{number % 10_000}", number >= MIN_POSTGRES_VERSION, "15")
    for refused in filter(None, (writes.why_refused(prove=True), preconditions.why_text_is_refused())):
        yield error("postgresql", refused)
    used = tuple(dict.fromkeys((*OWN_TABLES, *(one.model for batch in BATCHES.values() for one in batch.relations))))
    if hidden := list(schema.find_closed_schemas(used)):
        yield from (error("privileges", said) for said in hidden)
        return
    lists = process is not ProcessRole.EXPORTER
    wanted: dict[type[Base] | str, list[str]] = {schema.MIGRATIONS_TABLE: ["select"]} if lists else {}
    wanted |= {model: list_privileges(model, process) for model in OWN_TABLES}
    tables = relations.read_columns([schema.MIGRATIONS_TABLE, *map(relation_name, OWN_TABLES)])
    lacking = list(relations.find_missing_privileges(wanted, tables))
    yield from (error("privileges", said) for said in lacking)
    if any(schema.MIGRATIONS_TABLE in said for said in lacking):
        return
    if lists and (pending := migrations.list_pending(database.obj)):
        said = (
            "forgekeeper's tables do not exist yet"
            if FIRST_MIGRATION in pending
            else f"pending migrations: {', '.join(pending)}"
        )
        yield error("schema", f"{said}; run `forgekeeper migrate`, as the owner of the tables")
        return
    found = [(one.sentence, one.is_harmless) for one in schema.find_differences(OWN_TABLES)]
    found += [(sentence, False) for sentence in preconditions.find_misreadings(OWN_TABLES, tables)]
    yield from ((warning if harmless else error)("schema", sentence) for sentence, harmless in found)
    if not lacking and not found:
        yield ok("schema", "forgekeeper's own tables are correct")
    # A forge that creates its tables in our schema has rights there.
    yield from (warning("privileges", said) for said in definers.find_misused_functions(settings.own_schema))
    yield from (error("privileges", said) for said in definers.find_misused_triggers(settings.forge_schema))
    yield from check_forge_tables(settings, process)


def _check_clocks(settings: Settings) -> Iterator[Finding]:
    """Compare the clocks if all of them answer."""
    try:
        apart = [one for one in preconditions.compare_clocks() if one.exceeds(settings.clock_tolerance)]
    except (pw.PeeweeException, redis.RedisError):
        return  # reported elsewhere
    for difference in apart:
        yield (error if difference.reference == "redis" else warning)("clocks", difference.as_sentence())
    if not apart:
        yield ok("clocks", "the clocks of PostgreSQL, Redis and this machine agree")


def _check_place(*, copied: bool, reason: str | None) -> Finding | None:
    """Report a database that has moved; with a *reason* record its present place."""
    try:
        if reason is not None:
            with database.atomic():
                if (found := installation.record_place(copied=copied)) is not None:
                    before, after = ({"installation": one.installation, "place": str(one.recorded)} for one in found)
                    act = f"check --init {'--copied' if copied else '--moved'}"
                    acts.record_act(act, "the installation", reason=reason, before=before, after=after)
                    if copied:
                        # A release of the original does not release its copy.
                        hold_new_batches(list_deleting_batches())
                        forget_epochs()
        said = installation.why_misplaced()
    except pw.PeeweeException as refused:
        if reason is None or sqlstate(refused) != MISSING_RIGHT_SQLSTATE:
            return None  # missing tables and missing rights are reported elsewhere
        said = "--moved and --copied need the owner of the tables: use the role that runs `forgekeeper migrate`"
    except installation.ClusterUnreadable as unknown:
        said = str(unknown)
    return error("installation", said) if said else None


def _check_installation(*, init: bool, asks_redis: bool) -> tuple[str | None, Finding]:
    """Report the installation of database and Redis; with *init* claim an unclaimed Redis."""
    try:
        ours = Installation.ensure_id()
        if not asks_redis:
            return ours, ok("installation", f"{ours}, in PostgreSQL")
        theirs = find_redis_owner(client)
        if theirs is None and init:
            acts.record_act("check --init", "redis", after={"installation": ours})
            theirs = claim_redis(client, ours)
    except pw.PeeweeException as refused:
        said = "the database does not name its installation: see the lines above"
        if sqlstate(refused) == UNDEFINED_TABLE:
            said = "there is no installation yet: `forgekeeper migrate` creates it"
        return None, error("installation", said)
    except redis.RedisError:
        return ours, warning("installation", f"{ours}; Redis does not name its installation")
    if theirs is None:
        said = "Redis is claimed when a worker, a scheduler or `forgekeeper check --init` starts"
        return ours, ok("installation", f"{ours}; {said}")
    if theirs != ours:
        return ours, error("installation", mismatch_message(ours, theirs))
    return ours, ok("installation", f"{ours}, in PostgreSQL and Redis")


def _check_registers() -> Iterator[Finding]:
    """Report each register in Redis that has lost its entries."""
    with suppress(pw.PeeweeException, redis.RedisError):  # reported elsewhere
        for batch in BATCHES.values():
            if lost := why_register_is_lost(batch):
                yield error("redis", lost)


def _check_git() -> Finding:
    program = shutil.which("git")
    return ok("git", program) if program else warning("git", "git is not on the PATH: no refs can be deleted")
