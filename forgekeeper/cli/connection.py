"""Connections of a command, and the errors of servers and the machine with remedies."""

from __future__ import annotations

import atexit
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import peewee as pw
import redis

from forgekeeper.api.batches import BATCHES, BatchSpec
from forgekeeper.audit import acts
from forgekeeper.cli.standby import warn_while_waiting
from forgekeeper.cli.terminal import HELD_STATUS, Problem, err, wrong_use
from forgekeeper.delivery.boot import load_settings
from forgekeeper.delivery.error_reports import ErrorReporter
from forgekeeper.guards import preconditions
from forgekeeper.guards.preconditions import Blocked
from forgekeeper.guards.register_epoch import find_warnings
from forgekeeper.platform import migrations
from forgekeeper.platform.connections import ServerTimeouts, configure_clients
from forgekeeper.platform.database import database, release_connection, sqlstate
from forgekeeper.platform.database.read_only import ReadOnlyViolation
from forgekeeper.platform.installation import InstallationMismatch, require_same_installation
from forgekeeper.platform.settings import Settings
from metrics import logs
from metrics.endpoint import PortTaken
from metrics.logs import clean_text, text_of

DATABASE_VARIABLE = "FORGEKEEPER_DATABASE_URL"
REDIS_VARIABLE = "FORGEKEEPER_REDIS_URL"
OWN_BUG_SQLSTATES = frozenset({"42601"})
"""SQLSTATEs that only a bug in our own statements can cause: syntax errors."""
CHECK_SCHEMAS_REMEDY = (
    "run `forgekeeper check`, and set FORGEKEEPER_OWN_SCHEMA and FORGEKEEPER_FORGE_SCHEMA to the schemas of the tables"
)
SQLSTATE_REMEDIES = {
    "42501": "grant that right to the database user, or run this as another user; "
    "`forgekeeper check` lists the missing rights",
    "25006": f"point {DATABASE_VARIABLE} at the primary, or turn default_transaction_read_only off for its user",
    "3F000": "run `forgekeeper migrate`, or set FORGEKEEPER_OWN_SCHEMA to an existing schema",
    "42P01": CHECK_SCHEMAS_REMEDY,
    "42703": CHECK_SCHEMAS_REMEDY,
    "57014": "try again when the server is less busy, or raise FORGEKEEPER_DATABASE_STATEMENT_TIMEOUT",
    "55P03": "another session holds a lock that this needs: try again, or raise FORGEKEEPER_DATABASE_LOCK_TIMEOUT",
    "53100": "free space on the database's disk, then try again",
    "53300": "wait until other connections have ended, or raise its max_connections",
}
"""Remedies by SQLSTATE."""
SQLSTATE_CLASS_REMEDIES = {
    "08": f"check {DATABASE_VARIABLE}",
    "40": "this conflicted with another session: try again",
    "42": "run `forgekeeper check`",
    "53": "give the server more of that resource, then try again",
    "57": "try again",
}
"""Remedies by the class of the SQLSTATE, its first two characters."""
CONNECTION_REMEDIES = {
    "password": f"check the user and the password in {DATABASE_VARIABLE}",
    "too many|remaining connection slots": "wait until other connections have ended, or raise its max_connections",
    "unsupported startup parameter": f"a pooler refuses an option of the URL: remove it from {DATABASE_VARIABLE}",
    "starting up|shutting down|recovery mode": "try again when the server is up",
    # A new session on a server with a full disk fails with this message, before it can send a code.
    "could not write init file|no space left": "free space on the database's disk, then try again",
    "ssl negotiation|server closed the connection": (
        "the server at that address may not be PostgreSQL, or is a pooler in statement mode, which must become"
        f" transaction mode: check {DATABASE_VARIABLE}"
    ),
}
"""Remedies by words of the message. A failed connection lacks a SQLSTATE."""
REDIS_REMEDIES = {
    "certificate verify failed: .*mismatch": f"write the host that the certificate names into {REDIS_VARIABLE};"
    " Sentinels name the host of Redis: let them announce it (resolve-hostnames, announce-hostnames)",
    "certificate verify failed: .*(expired|not yet valid)": "renew that server's certificate, or set the clock of this"
    " machine",
    "certificate verify failed": "this machine does not know the authority of that server's certificate: name the"
    f" authority's file with the option ssl_ca_certs in {REDIS_VARIABLE}",
    "certificate required|violation of protocol": "that server may require a certificate of its clients: name its files"
    f" with the options ssl_certfile and ssl_keyfile in {REDIS_VARIABLE}",
    "no sentinel .*authentication required": f"write the Sentinels' password into {REDIS_VARIABLE} as the option"
    " sentinel_password",
    "no sentinel .*unknown command": f"that server is not a Sentinel: name the Sentinels in {REDIS_VARIABLE}",
    "no such master": f"write the name from the Sentinels' `sentinel monitor` into {REDIS_VARIABLE}, after the hosts",
    "noauth|authentication required": f"write the password into {REDIS_VARIABLE}, before the host",
    "wrongpass|invalid (username-)?password|without any password": (
        f"check the user and the password in {REDIS_VARIABLE}"
    ),
    "noperm|no permissions": f"grant that right to the user with ACL SETUSER, or name another user in {REDIS_VARIABLE}",
    "readonly|read only replica": f"this is a replica: point {REDIS_VARIABLE} at its master",
    "maxmemory": "Redis is full: raise maxmemory, and set maxmemory-policy to noeviction",
    "timeout connecting|wrong version number|record layer failure": "no server answers there, or the server does not"
    f" speak TLS although {REDIS_VARIABLE} begins with rediss://: check host, port and scheme",
    "misconf": "free space on the disk of Redis, or fix the error in its log",
    "wrongtype": "another program may use the same database and one of our keys; `forgekeeper check` names"
    f" the key: rename it, or name another database in {REDIS_VARIABLE}",
    "protocol error|invalid response": f"the server at that address is not Redis: check {REDIS_VARIABLE}",
    "max number of clients": "wait until other connections have ended, or raise its maxclients",
    "moved |crossslot|clusterdown|hash slot": (
        f"Redis Cluster is not supported: name a single Redis in {REDIS_VARIABLE}"
    ),
    "unknown command": "forgekeeper needs Redis 6.2 or newer, without renamed commands",
    "loading|master ?(is )?down": "try again when it is ready",
    "busy": "a script blocks Redis: try again, or end the script with SCRIPT KILL",
}
"""Remedies by words of Redis' message."""
# Prefix that redis-py and Redis put before the error: the command of a pipeline, the line of a script.
REDIS_ERROR_PREFIX = re.compile(
    r"(?is)\A(?:command # \d+ \(.*\) of pipeline caused error: |error running script[^@]*(?:@user_script: ?\d+: -?)+)"
)


def load_and_configure_logging(*, reports_errors: bool = False) -> Settings:
    """Load the settings and configure logging; a process that *reports_errors* does so until its end."""
    settings = load_settings()
    reporter = ErrorReporter.from_settings(settings) if reports_errors else None
    if reporter is not None:
        atexit.register(reporter.close)
    logs.configure(settings.log_format, settings.log_level, on_error=reporter.report_line if reporter else None)
    return settings


@contextmanager
def connect_command(
    name: str,
    *,
    migrated: bool = True,
    redis_needed: bool = True,
    reports_errors: bool = False,
    limits: Callable[[Settings], ServerTimeouts] = ServerTimeouts.for_worker,
) -> Iterator[Settings]:
    """Connect this command to PostgreSQL.

    The schema must be up to date unless *migrated* is False, and the settings must name a Redis unless *redis_needed*
    is False. Errors of runs are reported if *reports_errors*. *limits* returns the command's timeouts. Acts inside the
    block are recorded, unless the audit is off.
    """
    settings = load_and_configure_logging(reports_errors=reports_errors)
    configure_clients(settings, limits(settings), name=name, connections=3, redis_needed=redis_needed)
    with record_acts(settings):
        database.connect()
        try:
            if migrated:
                require_schema()
                for warning in find_warnings():
                    err.print(f"warning: {clean_text(warning)}")
            with warn_while_waiting():
                yield settings
        finally:
            release_connection()


def record_acts(settings: Settings) -> AbstractContextManager[None]:
    """Record acts inside the block, unless the settings turn the audit off."""
    return acts.recording_acts(actor=settings.actor, on=settings.audit != "off")


def require_schema() -> None:
    """Raise `Problem` if migrations are pending. Needs a connection."""
    if pending := migrations.list_pending(database.obj):
        raise Problem(f"the database lacks {len(pending)} migration(s): run `forgekeeper migrate`")


def require_redis() -> None:
    """Raise `Problem` unless Redis answers and belongs to the database's installation."""
    try:
        require_same_installation()
    except InstallationMismatch as disagreement:
        raise Problem(str(disagreement)) from None


def require_installation() -> None:
    """Refuse a Redis of another installation. A Redis that does not answer is accepted."""
    with suppress(redis.RedisError):
        require_redis()


def require_unblocked(batch: BatchSpec, settings: Settings) -> None:
    """Raise `Problem` if a run of the batch would be blocked at its start.

    Rights that only a worker needs are not checked. Raises `redis.RedisError` if Redis does not answer.
    """
    try:
        preconditions.require_met(batch, settings, claims=False)
    except Blocked as blocked:
        raise Problem(f"{batch.name} would be blocked: {blocked}", HELD_STATUS) from None


def batch_named(name: str) -> BatchSpec:
    """Return the batch; raise `Problem` if the name is unknown."""
    if name not in BATCHES:
        wrong_use(f"there is no batch {name!r}; there are: {', '.join(sorted(BATCHES))}")
    return BATCHES[name]


def describe_with_remedy(error: BaseException) -> str | None:
    """Describe an error with its remedy; None if the operator cannot fix it."""
    if isinstance(error, pw.DatabaseError | pw.InterfaceError):
        return _describe_postgresql_error(error)
    if isinstance(error, redis.RedisError):
        line = REDIS_ERROR_PREFIX.sub("", _first_line(error))
        return f"cannot use Redis: {line}; {_find_remedy(line, REDIS_REMEDIES) or f'check {REDIS_VARIABLE}'}"
    if isinstance(error, ReadOnlyViolation):
        return str(error)
    if isinstance(error, PortTaken):
        return f"{error}; stop the program that uses it, or choose another port"
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}; fix that on this machine, then try again"
    return None


def _describe_postgresql_error(error: pw.PeeweeException) -> str | None:
    state, line = sqlstate(error), _first_line(error)
    if state is None:
        return (
            f"cannot use PostgreSQL: {line}; {_find_remedy(line, CONNECTION_REMEDIES) or f'check {DATABASE_VARIABLE}'}"
        )
    if state in OWN_BUG_SQLSTATES:
        return None
    hint = (
        SQLSTATE_REMEDIES.get(state)
        or SQLSTATE_CLASS_REMEDIES.get(state[:2])
        or "run `forgekeeper check` to find the cause"
    )
    return f"cannot use PostgreSQL: {line}; {hint}"


def _find_remedy(line: str, table: dict[str, str]) -> str | None:
    return next((hint for words, hint in table.items() if re.search(words, line, re.IGNORECASE)), None)


def _first_line(error: Exception) -> str:
    lines = text_of(error).strip().splitlines() or [type(error).__name__]
    return clean_text(lines[0].rstrip("."))
