"""What may write: while a batch is asked what goes, its session may only read, and only the engine writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

import peewee as pw

from forgekeeper.database import database, sqlstate

READ_ONLY = "25006"
"""PostgreSQL's refusal to write in a transaction that may only read."""
GUARD = """
    select current_setting('default_transaction_read_only'), set_config('default_transaction_read_only', 'on', false)
"""

_guarded: ContextVar[str | None] = ContextVar("guarded", default=None)
_engine: ContextVar[bool] = ContextVar("engine", default=False)

INSTEAD = 'return Rows, Items or Children and the engine deletes, or declare writes="why"'


class WritesByItself(Exception):
    """A batch writes, instead of returning what goes; the message names it, and says what to do."""


class TakesNoWrites(Exception):
    """Somebody has made this database, or this role, read-only: nothing is deleted until that is undone."""


@contextmanager
def reading_only(batch: str) -> Iterator[None]:
    """Let PostgreSQL refuse whatever this session writes, but for the engine's own transactions.

    Raises `WritesByItself` for what was refused.  A database that others have made read-only stays so: then this
    raises `TakesNoWrites`.
    """
    token = _guarded.set(batch)
    # An interrupt may come at any point from here on: then `database.release` throws the connection away.
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


def insist(how: str) -> None:
    """Raise `WritesByItself` where a batch that is asked what goes would write, delete or lock *how*."""
    if (batch := _guarded.get()) is not None and not _engine.get():
        raise WritesByItself(f"{batch} writes by itself, {how}: {INSTEAD}")


def write_first() -> str:
    """Return what stands before a statement of the engine's that writes, in the same request."""
    return "set transaction read write; " if _guarded.get() else ""


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
