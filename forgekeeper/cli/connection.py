"""Connections of a command, and the errors of servers and the machine with remedies."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import peewee as pw
import redis

from forgekeeper.api.batches import BATCHES, BatchSpec
from forgekeeper.audit import acts
from forgekeeper.cli.standby import said_while_waiting
from forgekeeper.cli.terminal import HELD, Problem, err, wrong_use
from forgekeeper.delivery.boot import load
from forgekeeper.guards import preconditions
from forgekeeper.guards.preconditions import Blocked
from forgekeeper.guards.register_epoch import find_warnings
from forgekeeper.platform import migrations
from forgekeeper.platform.connections import Limits, connect
from forgekeeper.platform.database import database, release, sqlstate
from forgekeeper.platform.database.looking import WritesInLook
from forgekeeper.platform.installation import Disagreement, agree
from forgekeeper.platform.settings import Settings
from metrics import logs
from metrics.endpoint import PortTaken
from metrics.logs import clean, text_of

DATABASE = "FORGEKEEPER_DATABASE_URL"
REDIS = "FORGEKEEPER_REDIS_URL"
OURS = frozenset({"42601"})
"""SQLSTATEs that only a bug in our own statements can cause: syntax errors."""
LOOK = "run `forgekeeper check`, and look whether it lies in FORGEKEEPER_OWN_SCHEMA or FORGEKEEPER_FORGE_SCHEMA"
STATES = {
    "42501": "grant that to the user of the database, or let another run this; "
    "`forgekeeper check` lists what is missing",
    "25006": f"point {DATABASE} at the primary, or turn default_transaction_read_only off for its user",
    "3F000": "run `forgekeeper migrate`, or name a schema that is there in FORGEKEEPER_OWN_SCHEMA",
    "42P01": LOOK,
    "42703": LOOK,
    "57014": "try again when the server is less busy, or raise FORGEKEEPER_DATABASE_STATEMENT_TIMEOUT",
    "55P03": "another session holds what this needs: try again, or raise FORGEKEEPER_DATABASE_LOCK_TIMEOUT",
    "53100": "free space on the database's disk, then try again",
    "53300": "wait until others have left, or raise its max_connections",
}
"""Remedies by SQLSTATE."""
CLASSES = {
    "08": f"check {DATABASE}",
    "40": "another session was in the way: try again",
    "42": "run `forgekeeper check`",
    "53": "give the server more of what it lacks, then try again",
    "57": "try again",
}
"""Remedies by the class of the SQLSTATE, its first two characters."""
CONNECTING = {
    "password": f"check the user and the password in {DATABASE}",
    "too many|remaining connection slots": "wait until others have left, or raise its max_connections",
    "starting up|shutting down|recovery mode": "try again when the server is up",
    # A new session on a server with a full disk fails with this message, before it can send a code.
    "could not write init file|no space left": "free space on the database's disk, then try again",
    "ssl negotiation|server closed the connection": f"what listens there may not be PostgreSQL: check {DATABASE}",
}
"""Remedies by words of the message. A failed connection lacks a SQLSTATE."""
REDIS_WORDS = {
    "noauth|authentication required": f"give its password in {REDIS}, before the host",
    "wrongpass|invalid (username-)?password|without any password": f"check the user and the password in {REDIS}",
    "noperm|no permissions": f"grant that to its user with ACL SETUSER, or name another user in {REDIS}",
    "readonly|read only replica": f"this is a replica: point {REDIS} at its master",
    "maxmemory": "it is full: give it more memory (maxmemory); evict nothing (maxmemory-policy noeviction)",
    "timeout connecting|wrong version number|record layer failure": "nothing answers there, or it speaks no TLS though"
    f" {REDIS} begins with rediss://: check host, port and scheme",
    "misconf": "free space on the disk of Redis, or mend what its log says",
    "wrongtype": "another program may use the same database, and a key of ours; `forgekeeper check` names"
    f" it: move it away, or name another database in {REDIS}",
    "protocol error|invalid response": f"what listens there is not Redis: check {REDIS}",
    "max number of clients": "wait until others have left, or raise its maxclients",
    "moved |crossslot|clusterdown|hash slot": f"a Redis Cluster does not do: point {REDIS} at a single Redis",
    "unknown command": "forgekeeper needs Redis 6.2 or newer, with none of its commands renamed",
    "loading|master ?(is )?down": "try again when it is ready",
    "busy": "a script holds it up: try again, or end it with SCRIPT KILL",
}
"""Remedies by words of Redis' message."""
# Prefix that redis-py and Redis put before the error: the command of a pipeline, the line of a script.
PREAMBLE = re.compile(
    r"(?is)\A(?:command # \d+ \(.*\) of pipeline caused error: |error running script[^@]*(?:@user_script: ?\d+: -?)+)"
)


def configured() -> Settings:
    """Load the settings and configure logging."""
    settings = load()
    logs.configure(settings.log_format, settings.log_level)
    return settings


@contextmanager
def connected(
    name: str,
    *,
    migrated: bool = True,
    redis_needed: bool = True,
    limits: Callable[[Settings], Limits] = Limits.of_worker,
) -> Iterator[Settings]:
    """Connect this command to PostgreSQL.

    The schema must be up to date unless *migrated* is False, and the settings must name a Redis unless *redis_needed*
    is False. *limits* returns the command's timeouts. Acts inside the block are recorded, unless the audit is off.
    """
    settings = configured()
    connect(settings, limits(settings), name=name, connections=3, redis_needed=redis_needed)
    with recorded(settings):
        database.connect()
        try:
            if migrated:
                require_schema()
                for warning in find_warnings():
                    err.print(f"warning: {clean(warning)}")
            with said_while_waiting():
                yield settings
        finally:
            release()


def recorded(settings: Settings) -> AbstractContextManager[None]:
    """Record acts inside the block, unless the settings turn the audit off."""
    return acts.begin(actor=settings.actor, on=settings.audit != "off")


def require_schema() -> None:
    """Raise `Problem` if migrations are pending. Needs a connection."""
    if pending := migrations.pending(database.obj):
        raise Problem(f"the database lacks {len(pending)} migration(s): run `forgekeeper migrate`")


def require_redis() -> None:
    """Raise `Problem` unless Redis answers and belongs to the database's installation."""
    try:
        agree()
    except Disagreement as disagreement:
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
        preconditions.require(batch, settings, claims=False)
    except Blocked as blocked:
        raise Problem(f"{batch.name} would be blocked: {blocked}", HELD) from None


def batch_named(name: str) -> BatchSpec:
    """Return the batch; raise `Problem` if the name is unknown."""
    if name not in BATCHES:
        wrong_use(f"there is no batch {name!r}; there are: {', '.join(sorted(BATCHES))}")
    return BATCHES[name]


def sentence(error: BaseException) -> str | None:
    """Describe an error with its remedy; None if the operator cannot mend it."""
    if isinstance(error, pw.DatabaseError | pw.InterfaceError):
        return _postgresql(error)
    if isinstance(error, redis.RedisError):
        line = PREAMBLE.sub("", _line(error))
        return f"cannot use Redis: {line}; {_by_words(line, REDIS_WORDS) or f'check {REDIS}'}"
    if isinstance(error, WritesInLook):
        return str(error)
    if isinstance(error, PortTaken):
        return f"{error}; stop what is there, or choose another port"
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}; mend that on this machine, then try again"
    return None


def _postgresql(error: pw.PeeweeException) -> str | None:
    state, line = sqlstate(error), _line(error)
    if state is None:
        return f"cannot use PostgreSQL: {line}; {_by_words(line, CONNECTING) or f'check {DATABASE}'}"
    if state in OURS:
        return None
    hint = STATES.get(state) or CLASSES.get(state[:2]) or "`forgekeeper check` looks for the cause"
    return f"cannot use PostgreSQL: {line}; {hint}"


def _by_words(line: str, table: dict[str, str]) -> str | None:
    return next((hint for words, hint in table.items() if re.search(words, line, re.IGNORECASE)), None)


def _line(error: Exception) -> str:
    lines = text_of(error).strip().splitlines() or [type(error).__name__]
    return clean(lines[0].rstrip("."))
