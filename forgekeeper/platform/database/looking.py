"""Looks: transactions that PostgreSQL itself lets only read, whatever a condition, a view or a function would do.

All statements of a look see one snapshot.  It begins and ends with a transaction, so a pooler may give the session to
anybody afterwards.  Everything that only shows something opens one: `status`, previews, backlogs, the breaker, the
exporter, the console and `check`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import peewee as pw

from forgekeeper.platform.database.sessions import READ_ONLY, database, sqlstate

SNAPSHOT = "repeatable read, read only"
WRITES = (
    "{} writes, though it is only looked at, and PostgreSQL has refused that ({}): let no condition, view or function"
    " that it reads write"
)

Given = ParamSpec("Given")
Answer = TypeVar("Answer")
_looks: ContextVar[bool] = ContextVar("looks", default=False)


class WritesInLook(pw.InternalError):
    """A look would write; the message is a sentence that names it."""


@contextmanager
def looking(whose: str = "what is shown here") -> Iterator[None]:
    """Let PostgreSQL refuse whatever is written within; raise `WritesInLook`, which names *whose* look it is.

    Within another transaction it is a savepoint, and what it sets for the transaction ends with it.  Without a
    connection it does nothing.
    """
    if database.is_closed():
        yield
        return
    reads_already, token = _looks.get(), _looks.set(True)
    try:
        if database.transaction_depth():
            with _within_another(reads_already=reads_already):
                yield
        else:
            with database.atomic(SNAPSHOT):
                yield
    except pw.PeeweeException as error:
        if sqlstate(error) != READ_ONLY:
            raise
        raise WritesInLook(WRITES.format(whose, str(error).strip().splitlines()[0])) from error
    finally:
        _looks.reset(token)


@contextmanager
def _within_another(*, reads_already: bool) -> Iterator[None]:
    with database.atomic() as savepoint:
        if not reads_already:
            database.execute_sql("set transaction read only")
        yield
        savepoint.rollback(begin=False)


def as_look(whose: str, ask: Callable[Given, Answer]) -> Callable[Given, Answer]:
    """Return *ask* as a look; what it yields is a list, as all of it is asked within."""

    @wraps(ask)
    def look(*args: Given.args, **kwargs: Given.kwargs) -> Any:
        with looking(whose):
            found = ask(*args, **kwargs)
            return list(found) if isinstance(found, Iterator) else found

    return look
