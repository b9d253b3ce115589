"""Sessions of PostgreSQL: how they are opened, how long they wait, what is prepared in them, and who may write there.

Nothing connects on its own (``autoconnect=False``): code that works with models holds a connection for exactly that
long, so that none can leak or be shared by accident.  While a batch is asked what goes, its session may only read: only
the engine writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from hashlib import md5
from json import loads
from multiprocessing.connection import wait
from typing import Any

import peewee as pw
from playhouse.pool import PooledPostgresqlDatabase
from psycopg2 import extensions
from psycopg2.extras import register_default_jsonb

SCHEMAS = ("forgekeeper", "public")
"""Where our own tables are unless a setting says otherwise, and the forge's."""
TIMESTAMPTZ = 1184
FIXED = {
    # Psycopg2 would ask for this date style with a statement of its own.
    "timezone": "UTC",
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "bytea_output": "hex",
    "standard_conforming_strings": "on",
    "extra_float_digits": "1",
    "quote_all_identifiers": "off",
    "transform_null_equals": "off",
    "array_nulls": "on",
    "xmloption": "content",
    "default_transaction_isolation": "read committed",
    "default_transaction_deferrable": "off",
    # A commit that is not on the disk is undone by a crash: a row would be there again, and its object or ref gone.
    "synchronous_commit": "on",
    # Where a plan may not scan a table and has to, PostgreSQL up to 17 takes it for so costly that it compiles each
    # chunk's statement, for up to a second.
    "jit": "off",
}
"""Settings of every session, whatever the server, the database or the role sets: our statements, and what we read of
their answers, depend on them."""
ESCAPED_SPACE = "\\ "
FIRST_INSTANT, LAST_INSTANT = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)

LOCK_NOT_AVAILABLE = "55P03"
"""A lock that another session has: the statement does not wait for it, or has waited for too long."""
READ_ONLY = "25006"
"""PostgreSQL's refusal to write in a transaction that may only read."""
GUARD = """
    select current_setting('default_transaction_read_only'), set_config('default_transaction_read_only', 'on', false)
"""
INSTEAD = 'return Rows, Objects or Children and the engine deletes, or declare writes="why"'

MOST = 50
"""So many statements are prepared on a connection."""
GONE = {"26000", "42P05", "0A000"}
"""Not there, there already, or of another result now: a pooler has given us another session, or a table has changed."""
VALUE = re.compile(r"%\((\w+)\)s")
PATH = re.compile(r"search_path\s*=\s*(\S+)")

database = pw.DatabaseProxy()

_guarded: ContextVar[str | None] = ContextVar("guarded", default=None)
_engine: ContextVar[bool] = ContextVar("engine", default=False)


class WritesByItself(Exception):
    """A batch writes, instead of returning what goes; the message names it, and says what to do."""


class TakesNoWrites(Exception):
    """Somebody has made this database, or this role, read-only: nothing is deleted until that is undone."""


@dataclass(frozen=True)
class Timeouts:
    """How long a session waits, for what."""

    connect: timedelta
    statement: timedelta
    lock: timedelta
    idle_in_transaction: timedelta
    network: timedelta


class Connection(extensions.connection):
    """A connection that knows what is prepared on it, and whether its session may only read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prepared: set[str] | None = set()
        """Names of prepared statements; None where nothing is to be prepared any more."""
        self.reads_only = False


class Database(pw.PostgresqlDatabase):
    """A database whose instants and documents Python can always hold.

    *schema* is where forgekeeper's own tables are, *forge_schema* where the forge's are: its sessions find both by
    their names, ours first.

    Each thread has a connection of its own, so peewee's lock around connecting guards nothing: with it, a server that
    does not answer would stop all threads for the sum of their time-outs.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lock = nullcontext()
        self.schema, self.forge_schema = SCHEMAS

    def _connect(self) -> Any:
        made = super()._connect()  # type: ignore[misc]
        extensions.register_type(INSTANT, made)
        register_default_jsonb(made, loads=_document)
        return made

    def manual_close(self) -> None:
        """Throw the connection away."""
        self.close()


class Pool(PooledPostgresqlDatabase, Database):  # type: ignore[misc]  # playhouse has no types
    """A pool of such a database's connections."""

    def _is_closed(self, connection: Connection) -> bool:
        """Say whether the server has ended an idle connection, without asking it: all threads would wait for that."""
        return bool(connection.closed or wait([connection.fileno()], timeout=0))


def open_pool(url: str, timeouts: Timeouts, *, name: str, size: int | None, schemas: tuple[str, str] = SCHEMAS) -> None:
    """Let the models use a pool of at most *size* connections, or where that is None one of each thread's own.

    Their names are looked for in *schemas*, ours and the forge's, and then in those that the options of *url* name.
    """
    made: Any = Database(None, autoconnect=False)
    if size is not None:
        made = Pool(None, max_connections=size, timeout=timeouts.connect.total_seconds(), autoconnect=False)
    made.schema, made.forge_schema = schemas
    parameters = extensions.parse_dsn(url)
    options = _session_options(parameters.pop("options", ""), timeouts, schemas)
    quarter = max(1, round(timeouts.network.total_seconds() / 4))
    made.init(
        parameters.pop("dbname", None) or parameters.get("user") or "postgres",
        # In UTF-8 it is PostgreSQL that refuses what is no text, within the statement: nothing is done by then.
        **{"application_name": f"forgekeeper {name}", **parameters, "client_encoding": "UTF8"},
        connect_timeout=max(2, round(timeouts.connect.total_seconds())),  # libpq takes 1 for 2
        tcp_user_timeout=_milliseconds(timeouts.network),
        keepalives_idle=quarter,
        keepalives_interval=quarter,
        keepalives_count=3,
        connection_factory=Connection,
        options=options,
    )
    database.initialize(made)


def _session_options(given: str, timeouts: Timeouts, schemas: tuple[str, str]) -> str:
    """Return the options of every session: the options *given* in the URL, and ours, which override them."""
    settings = FIXED | {
        "statement_timeout": str(_milliseconds(timeouts.statement)),
        "lock_timeout": str(_milliseconds(timeouts.lock)),
        "idle_in_transaction_session_timeout": str(_milliseconds(timeouts.idle_in_transaction)),
        "search_path": ",".join([*schemas, *PATH.findall(given)]),
    }
    ours = (f"-c {name}={value.replace(' ', ESCAPED_SPACE)}" for name, value in settings.items())
    return " ".join([given, *ours]).strip()


def _milliseconds(duration: timedelta) -> int:
    return max(1, round(duration.total_seconds() * 1000))


def _instant(value: str | bytes | None, of: extensions.cursor) -> datetime | None:
    """Read an instant; one that Python does not reach is the first or the last that it does."""
    try:
        instant: datetime | None = extensions.PYDATETIMETZ(value, of)
    except (ValueError, OverflowError):
        assert isinstance(value, str)
        return LAST_INSTANT if "BC" not in value else FIRST_INSTANT
    return instant


INSTANT = extensions.new_type((TIMESTAMPTZ,), "INSTANT", _instant)


def _document(text: str) -> Any:
    """Read a JSON document; None for one that is nested deeper than Python can follow, or has longer numbers."""
    try:
        return loads(text)
    except (ValueError, RecursionError):
        return None


def release() -> None:
    """Give this thread's connection back; throw it away unless it is clean.

    An interrupt can leave a transaction open that peewee knows nothing of, into which the next message would write;
    or it leaves the session of a batch, which may only read.
    """
    if database.is_closed():
        return
    connection = database.connection()
    clean = not (connection.closed or connection.reads_only) and _is_idle(connection)
    if clean and not database.in_transaction():
        database.close()
        return
    while database.transaction_depth():
        database.pop_transaction()
    database.manual_close()


def _is_idle(connection: Connection) -> bool:
    return connection.get_transaction_status() == extensions.TRANSACTION_STATUS_IDLE


def sqlstate(error: BaseException) -> str | None:
    """Return PostgreSQL's five-letter code of what went wrong, None if it was not PostgreSQL."""
    return getattr(getattr(error, "orig", error), "pgcode", None)


def reachable() -> bool:
    """Say whether this thread's connection still works, after a statement on it has failed."""
    return not database.is_closed() and not database.connection().closed


def now() -> datetime:
    """Return the database's time, the only clock that decides what is due."""
    instant: datetime = database.execute_sql("select clock_timestamp()").fetchone()[0]
    return instant


@contextmanager
def reading_only(batch: str) -> Iterator[None]:
    """Let PostgreSQL refuse whatever this session writes, but for the engine's own transactions.

    Raises `WritesByItself` for what was refused.  A database that others have made read-only stays so: then this
    raises `TakesNoWrites`.
    """
    token = _guarded.set(batch)
    # An interrupt may come at any point from here on: then `release` throws the connection away.
    database.connection().reads_only = True
    try:
        _let_only_read()
        yield
    except Exception as error:
        if sqlstate(error) != READ_ONLY:
            raise
        raise WritesByItself(f"{batch} writes by itself: {INSTEAD}") from error
    finally:
        _guarded.reset(token)
        _let_write()


def _let_only_read() -> None:
    (before, _now) = database.execute_sql(GUARD).fetchone()
    if before == "on":
        raise TakesNoWrites(TakesNoWrites.__doc__)


def _let_write() -> None:
    """Undo the guard; a connection on which that fails must not be used by others."""
    try:
        database.execute_sql("reset default_transaction_read_only")
        database.connection().reads_only = False
    except pw.PeeweeException:
        with suppress(pw.PeeweeException):
            database.connection().close()


@contextmanager
def engine() -> Iterator[None]:
    """Let what is done within write: it is a step of the engine's, outside the database too."""
    token = _engine.set(True)
    try:
        yield
    finally:
        _engine.reset(token)


@contextmanager
def writing() -> Iterator[None]:
    """Open a transaction of the engine's that may write; within another one a savepoint."""
    with engine(), database.atomic("read committed, read write") if _guarded.get() else database.atomic():
        yield


@dataclass
class Unit:
    """A transaction of the engine's: *first* begins it in the request of its first statement, *end* ends it."""

    first: str = "begin isolation level read committed, read write; "
    end: str = "commit"


@contextmanager
def committing() -> Iterator[Unit]:
    """Commit, after it, a transaction that the request of a first statement has begun; roll back for an exception.

    That statement may be a prepared one, which cannot be prepared within a transaction.
    """
    unit = Unit()
    try:
        yield unit
        database.execute_sql(unit.end)
    except BaseException:
        if reachable():
            with suppress(pw.PeeweeException):
                database.execute_sql("rollback")
        raise


def insist(how: str) -> None:
    """Raise `WritesByItself` where a batch that is asked what goes would write, delete or lock *how*."""
    if (batch := _guarded.get()) is not None and not _engine.get():
        raise WritesByItself(f"{batch} writes by itself, {how}: {INSTEAD}")


def write_first() -> str:
    """Return what stands before a statement of the engine's that writes, in the same request."""
    return "set transaction read write; " if _guarded.get() else ""


def execute_prepared(name: str, statement: str, values: Mapping[str, Any], *, first: str = "") -> Any:
    """Execute *statement*, which the server has read and planned once for this connection, not for each chunk.

    It is prepared by that *name* and a part of its hash; *first* stands before it in the request.  Where it cannot be
    prepared, as within a transaction of the caller's, the statement itself is executed.  A value whose type PostgreSQL
    cannot infer from where it stands needs a cast.  Without this a run took a third longer: `benchmarks statuses`.
    """
    connection = database.connection()
    known = connection.prepared
    full = f"{name}_{md5(statement.encode(), usedforsecurity=False).hexdigest()[:8]}"
    if known is not None and _is_idle(connection) and (full in known or len(known) < MOST):
        numbered, given = _numbered(statement)
        try:
            if full not in known:
                database.execute_sql(f"prepare {full} as {numbered}", {})
                known.add(full)
            return database.execute_sql(f"{first}execute {full}{given}", values)
        except pw.PeeweeException as error:
            if connection.closed or (full in known and sqlstate(error) not in GONE):
                raise
            connection.prepared = None
            if not _is_idle(connection):
                database.execute_sql("rollback")
    return database.execute_sql(first + statement, values)


@cache
def _numbered(statement: str) -> tuple[str, str]:
    """Return the statement with numbered values, and what stands for these in an execution."""
    names = list(dict.fromkeys(VALUE.findall(statement)))
    given = ", ".join(f"%({name})s" for name in names)
    return VALUE.sub(lambda found: f"${names.index(found[1]) + 1}", statement), f"({given})" if names else ""
