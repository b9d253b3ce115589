"""Looks: read-only transactions; PostgreSQL refuses all writes in them.

That includes writes by conditions, views and functions.  All statements of a look see one snapshot.  A look is one
transaction, so a pooler may give the session to another client afterwards.  All readers open looks: `status`, previews,
backlogs, the breaker, the exporter, the console and `check`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import peewee as pw

from forgekeeper.platform.database.sessions import READ_ONLY_ERROR, database, sqlstate

SNAPSHOT_MODE = "repeatable read, read only"
WRITES_MESSAGE = (
    "{} tried to write during a read-only look, and PostgreSQL refused ({}): make sure that no condition, view or"
    " function that it reads writes"
)

Given = ParamSpec("Given")
Answer = TypeVar("Answer")
_reads_only: ContextVar[bool] = ContextVar("reads_only", default=False)


class ReadOnlyViolation(pw.InternalError):
    """A look tried to write; the message is a sentence that names the look."""


@contextmanager
def read_only_snapshot(reader: str = "this output") -> Iterator[None]:
    """Run the body as a look; raise `ReadOnlyViolation` if it writes.  *reader* names the look.

    Within another transaction the look is a savepoint, and ``set local`` in the body ends with it.  Without a
    connection it does nothing.
    """
    if database.is_closed():
        yield
        return
    reads_already, token = _reads_only.get(), _reads_only.set(True)
    try:
        if database.transaction_depth():
            with _read_only_savepoint(reads_already=reads_already):
                yield
        else:
            with database.atomic(SNAPSHOT_MODE):
                yield
    except pw.PeeweeException as error:
        if sqlstate(error) != READ_ONLY_ERROR:
            raise
        raise ReadOnlyViolation(WRITES_MESSAGE.format(reader, str(error).strip().splitlines()[0])) from error
    finally:
        _reads_only.reset(token)


@contextmanager
def _read_only_savepoint(*, reads_already: bool) -> Iterator[None]:
    with database.atomic() as savepoint:
        if not reads_already:
            database.execute_sql("set transaction read only")
        yield
        savepoint.rollback(begin=False)


def as_read_only(reader: str, ask: Callable[Given, Answer]) -> Callable[Given, Answer]:
    """Return *ask* as a look; an iterator becomes a list, because it is read within the look."""

    @wraps(ask)
    def ask_read_only(*args: Given.args, **kwargs: Given.kwargs) -> Any:
        with read_only_snapshot(reader):
            found = ask(*args, **kwargs)
            return list(found) if isinstance(found, Iterator) else found

    return ask_read_only
