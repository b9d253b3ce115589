"""Sessions of PostgreSQL: settings, timeouts, prepared statements, permission to write.

Nothing connects on its own (``autoconnect=False``): code that works with models opens a connection and closes it
afterwards, so no connection leaks or is shared by accident.  While the engine asks a batch for its answer, the session
is read-only: only the engine writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from hashlib import md5
from json import loads
from select import POLLIN, poll
from typing import Any, NamedTuple

import peewee as pw
from playhouse.pool import PooledPostgresqlDatabase
from psycopg2 import extensions
from psycopg2.extras import register_default_jsonb

from forgekeeper.platform.database.session_settings import Connection, Timeouts, list_settings, to_milliseconds

DEFAULT_SCHEMAS = ("forgekeeper", "public")
"""Default schemas: of forgekeeper's own tables, and of the forge's tables."""
TIMESTAMPTZ_OID = 1184
FIRST_INSTANT, LAST_INSTANT = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)

LOCK_NOT_AVAILABLE = "55P03"
"""SQLSTATE: another session holds a lock, and the statement does not wait for it or has waited too long."""
READ_ONLY_ERROR = "25006"
"""SQLSTATE: a write in a read-only transaction was refused."""
SELECT_DEFAULT_READ_ONLY = "select current_setting('default_transaction_read_only')"
MAKE_SESSION_READ_ONLY = f"{SELECT_DEFAULT_READ_ONLY}, set_config('default_transaction_read_only', 'on', false)"
WRITES_CURE = 'return Rows, Objects or Children so that the engine deletes, or declare writes="why"'

MAX_PREPARED_STATEMENTS = 50
"""Maximum prepared statements per connection."""
UNUSABLE_STATEMENT_ERRORS = {"26000", "42P05", "0A000"}
"""SQLSTATEs of a prepared statement that is missing, exists already, or would return other columns than before: a
pooler has given us another session, or a table has changed."""
VALUE_PATTERN = re.compile(r"%\((\w+)\)s")
SEARCH_PATH_PATTERN = re.compile(r"search_path\s*=\s*(\S+)")

database = pw.DatabaseProxy()

_guarded_batch: ContextVar[str | None] = ContextVar("guarded_batch", default=None)
_is_engine_step: ContextVar[bool] = ContextVar("is_engine_step", default=False)


class WritesByItself(Exception):
    """A batch writes instead of returning an answer; the message names the batch and the cure."""


class DatabaseReadOnly(Exception):
    """Somebody has made this database or role read-only: nothing is deleted until it may write again."""


class Database(pw.PostgresqlDatabase):
    """A database whose timestamps and JSON documents always convert to Python values.

    *schema* holds forgekeeper's own tables, *forge_schema* the forge's tables.  Sessions search both, ours first.

    Each thread has its own connection, so peewee's lock around connecting guards nothing: with it, a server that does
    not answer would stop all threads for the sum of their timeouts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lock = nullcontext()
        self.schema, self.forge_schema = DEFAULT_SCHEMAS
        self.settings: dict[str, str] = {}
        """PostgreSQL's settings for each session, by name."""

    def _connect(self) -> Any:
        made = super()._connect()  # type: ignore[misc]
        made.apply_settings(self.settings)
        extensions.register_type(INSTANT_TYPE, made)
        register_default_jsonb(made, loads=_parse_document)
        return made

    def manual_close(self) -> None:
        """Close the connection instead of returning it to a pool."""
        self.close()


class Pool(PooledPostgresqlDatabase, Database):  # type: ignore[misc]  # playhouse has no types
    """A `Database` that keeps its connections in a pool."""

    def _is_closed(self, connection: Connection) -> bool:
        """Return whether the server has closed an idle connection.

        Nothing is sent to the server: all threads would wait for the answer.
        """
        if connection.closed:
            return True
        sockets = poll()
        sockets.register(connection.fileno(), POLLIN)
        return bool(sockets.poll(0))


def open_pool(
    url: str, timeouts: Timeouts, *, name: str, size: int | None, schemas: tuple[str, str] = DEFAULT_SCHEMAS
) -> None:
    """Let the models use a pool of *size* connections, or if it is None one per thread.

    Tables are looked up in *schemas* (ours, the forge's), then in the ``search_path`` in the options of *url*.
    """
    made: Any = Database(None, autoconnect=False)
    if size is not None:
        made = Pool(None, max_connections=size, timeout=timeouts.connect.total_seconds(), autoconnect=False)
    made.schema, made.forge_schema = schemas
    parameters = extensions.parse_dsn(url)
    given = SEARCH_PATH_PATTERN.findall(parameters.get("options", ""))
    made.settings = list_settings(timeouts, ",".join([*schemas, *given]))
    if "," in parameters.get("host", ""):
        # After a failover the first host may be a standby, which accepts connections, too.
        parameters.setdefault("target_session_attrs", "read-write")
    quarter = max(1, round(timeouts.network.total_seconds() / 4))
    made.init(
        parameters.pop("dbname", None) or parameters.get("user") or "postgres",
        # With UTF-8 PostgreSQL itself refuses invalid text, within the statement: nothing has been changed by then.
        **{"application_name": f"forgekeeper {name}", **parameters, "client_encoding": "UTF8"},
        connect_timeout=max(2, round(timeouts.connect.total_seconds())),  # libpq takes 1 for 2
        tcp_user_timeout=to_milliseconds(timeouts.network),
        keepalives_idle=quarter,
        keepalives_interval=quarter,
        keepalives_count=3,
        connection_factory=Connection,
    )
    database.initialize(made)


def _parse_instant(value: str | bytes | None, cursor: extensions.cursor) -> datetime | None:
    """Parse a timestamp; beyond Python's range, return Python's first or last instant."""
    try:
        instant: datetime | None = extensions.PYDATETIMETZ(value, cursor)
    except (ValueError, OverflowError):
        assert isinstance(value, str)
        return LAST_INSTANT if "BC" not in value else FIRST_INSTANT
    return instant


INSTANT_TYPE = extensions.new_type((TIMESTAMPTZ_OID,), "INSTANT", _parse_instant)


def _parse_document(text: str) -> Any:
    """Parse a JSON document; return None if its depth or a number exceeds Python's limits."""
    try:
        return loads(text)
    except (ValueError, RecursionError):
        return None


def release_connection() -> None:
    """Return this thread's connection to the pool, or close it unless it is clean.

    An interrupt can leave a transaction open that peewee does not know, and the next message would write into it.  It
    can also leave the session read-only.
    """
    if database.is_closed():
        return
    connection = database.connection()
    clean = not (connection.closed or connection.is_read_only) and connection.is_idle()
    if clean and not database.in_transaction():
        database.close()
        return
    while database.transaction_depth():
        database.pop_transaction()
    database.manual_close()


def sqlstate(error: BaseException) -> str | None:
    """Return PostgreSQL's five-character error code, None if the error is not PostgreSQL's."""
    return getattr(getattr(error, "orig", error), "pgcode", None)


def is_connected() -> bool:
    """Return whether this thread's connection is still open after an error on it."""
    return not database.is_closed() and not database.connection().closed


def now() -> datetime:
    """Return the database's time, the only clock that decides whether a row is due."""
    instant: datetime = database.execute_sql("select clock_timestamp()").fetchone()[0]
    return instant


@contextmanager
def read_only_session(batch: str) -> Iterator[None]:
    """Let PostgreSQL refuse writes of this session, except in the engine's transactions.

    Raises `WritesByItself` if a write was refused, and `DatabaseReadOnly` if the database is read-only already; it then
    stays read-only.  Within another such session of this thread, only errors are explained.
    """
    is_outer = not database.connection().is_read_only
    token = _guarded_batch.set(batch)
    # If an interrupt arrives from here on, `release_connection` closes it.
    database.connection().is_read_only = True
    try:
        if is_outer:
            _let_only_read()
        yield
    except Exception as error:
        if sqlstate(error) != READ_ONLY_ERROR:
            raise
        raise WritesByItself(f"{batch} writes by itself: {WRITES_CURE}") from error
    finally:
        _guarded_batch.reset(token)
        if is_outer:
            _let_write()


def _let_only_read() -> None:
    # Through a pooler, each transaction becomes read-only: see `Connection.transaction_prefix`.
    pooled = database.connection().is_pooled
    (before, *_) = database.execute_sql(SELECT_DEFAULT_READ_ONLY if pooled else MAKE_SESSION_READ_ONLY).fetchone()
    if before == "on":
        raise DatabaseReadOnly(DatabaseReadOnly.__doc__)


def _let_write() -> None:
    """Allow writes again; if that fails, close the connection, as nobody else may use it."""
    try:
        if not database.connection().is_pooled:
            database.execute_sql("reset default_transaction_read_only")
        database.connection().is_read_only = False
    except pw.PeeweeException:
        with suppress(pw.PeeweeException):
            database.connection().close()


@contextmanager
def engine_step() -> Iterator[None]:
    """Mark the body as a step of the engine, which may write, delete and lock in any server."""
    token = _is_engine_step.set(True)
    try:
        yield
    finally:
        _is_engine_step.reset(token)


@contextmanager
def write_transaction() -> Iterator[None]:
    """Open a transaction of the engine that may write; within another one, a savepoint."""
    with engine_step(), database.atomic("read committed, read write") if _guarded_batch.get() else database.atomic():
        yield


@dataclass
class EngineTransaction:
    """A transaction of the engine.

    *begin* begins it, in the request of its first statement; *end* ends it.
    """

    begin: str = "begin isolation level read committed, read write; "
    end: str = "commit"


@contextmanager
def committed_transaction() -> Iterator[EngineTransaction]:
    """Commit the transaction that the body's first statement begins; roll back on an error.

    The first statement may be a prepared statement: these are not prepared within a transaction.
    """
    unit = EngineTransaction()
    try:
        yield unit
        database.execute_sql(unit.end)
    except BaseException:
        if is_connected():
            with suppress(pw.PeeweeException):
                database.execute_sql("rollback")
        raise


def require_engine(how: str) -> None:
    """Raise `WritesByItself` if a batch that is asked for its answer writes, deletes or locks.

    *how* is a part of the message.
    """
    if (batch := _guarded_batch.get()) is not None and not _is_engine_step.get():
        raise WritesByItself(f"{batch} writes by itself, {how}: {WRITES_CURE}")


def write_prefix() -> str:
    """Return the SQL to send before a writing statement of the engine, in the same request."""
    return "set transaction read write; " if _guarded_batch.get() else ""


class Statement(NamedTuple):
    """A statement with its *values*; it is prepared as *name* and a part of its hash.

    A value needs a cast if PostgreSQL cannot infer its type.
    """

    name: str
    text: str
    values: Mapping[str, Any]


def execute_prepared(name: str, statement: str, values: Mapping[str, Any], *, prefix: str = "") -> Any:
    """Execute *statement*, prepared once per connection; *prefix* is sent before it in the same request.

    Without preparing a run took a third longer: `benchmarks statuses`.
    """
    return _execute_request([Statement(name, statement, values)], prefix)


def execute_in_one_request(statements: Sequence[Statement]) -> Any:
    """Execute writing statements of the engine, each prepared once per connection; return the cursor of the last.

    Unless a transaction is open, they are a transaction of their own.
    """
    return _execute_request(statements, "" if database.in_transaction() else write_prefix())


def _execute_request(statements: Sequence[Statement], prefix: str) -> Any:
    """Execute statements in one request.

    If one cannot be prepared, for example within a transaction of the caller, all are executed directly.
    """
    connection = database.connection()
    forms = [_write_forms(place, one.name, one.text) for place, one in enumerate(statements)]
    names = {form.name for form in forms}
    values = {f"{place}_{name}": value for place, one in enumerate(statements) for name, value in one.values.items()}
    if (known := connection.prepared) is not None and connection.is_idle():
        try:
            if len(known | names) <= MAX_PREPARED_STATEMENTS:
                for form in forms:
                    if form.name not in known:
                        database.execute_sql(form.prepare, {})
                        known.add(form.name)
                return database.execute_sql(prefix + "; ".join(form.execute for form in forms), values)
        except pw.PeeweeException as error:
            if connection.closed or (names <= known and sqlstate(error) not in UNUSABLE_STATEMENT_ERRORS):
                raise
            connection.prepared = None
            if not connection.is_idle():
                database.execute_sql("rollback")
    return database.execute_sql(prefix + "; ".join(form.direct for form in forms), values)


class _Forms(NamedTuple):
    """A statement under its *name*: the SQL that prepares it, executes it prepared, and executes it directly."""

    name: str
    prepare: str
    execute: str
    direct: str


@cache
def _write_forms(place: int, name: str, statement: str) -> _Forms:
    """Return the forms of the statement at a *place* of a request, which begins the names of its values."""
    full = f"{name}_{md5(statement.encode(), usedforsecurity=False).hexdigest()[:8]}"
    names = list(dict.fromkeys(VALUE_PATTERN.findall(statement)))
    numbered = VALUE_PATTERN.sub(lambda found: f"${names.index(found[1]) + 1}", statement)
    given = ", ".join(f"%({place}_{name})s" for name in names)
    return _Forms(
        full,
        f"prepare {full} as {numbered}",
        f"execute {full}({given})" if names else f"execute {full}",
        VALUE_PATTERN.sub(rf"%({place}_\1)s", statement),
    )
