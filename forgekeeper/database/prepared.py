"""Statements that the server has read and planned once for a connection, instead of for each chunk anew.

psycopg2 prepares none, so this is ``PREPARE`` and ``EXECUTE``.  Whether a statement is prepared is a matter of speed
alone: where it cannot be, or is not there any more, the statement itself is executed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from hashlib import md5
from typing import Any, Self

from psycopg2 import Error
from psycopg2.extensions import TRANSACTION_STATUS_IDLE, connection

MOST = 50
"""So many statements are prepared on a connection; a loop has one, and a few where it passes over bad records."""
GONE = {"26000", "42P05", "0A000"}
"""Not there, there already, or of another result now: a pooler has given us another session, or a table has changed."""
VALUE = re.compile(r"%\((\w+)\)s")


class Preparable(connection):
    """A connection that knows what is prepared on it; None where nothing is to be."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prepared: set[str] | None = set()


class Prepared(str):
    """A statement for ``database.execute_sql`` that a connection of ours prepares when it executes it first.

    It is prepared by that *name* and a part of its hash.  *first* stands before it in the same request, and so in the
    same transaction.  Within a transaction of the caller's nothing is prepared: what failed there could not be executed
    once more.  A value that PostgreSQL cannot tell the type of from where it stands needs a cast.
    """

    __slots__ = ("first", "full", "statement")
    statement: str
    first: str
    full: str

    def __new__(cls, name: str, statement: str, *, first: str = "") -> Self:
        """Make one; as text it is what is executed where it is not prepared."""
        made = super().__new__(cls, first + statement)
        made.statement = statement
        made.first = first
        made.full = f"{name}_{md5(statement.encode(), usedforsecurity=False).hexdigest()[:8]}"
        return made

    def execute(self, on: Preparable, send: Callable[[str, Any], None], values: Mapping[str, Any]) -> None:
        """Have it executed by *send*, a cursor's of that connection."""
        if not self._is_prepared(on, send):
            return send(str(self), values)
        try:
            return send(f"{self.first}execute {self.full}{_read(self.statement)[1]}", values)
        except Error as error:
            if error.pgcode not in GONE or on.closed:
                raise
            on.prepared = None
            return send(str(self), values)

    def _is_prepared(self, on: Preparable, send: Callable[[str, Any], None]) -> bool:
        """Say whether it is, or could be now, prepared on that connection."""
        if on.prepared is None or not on.autocommit or on.get_transaction_status() != TRANSACTION_STATUS_IDLE:
            return False
        if self.full in on.prepared:
            return True
        if len(on.prepared) >= MOST:
            return False
        try:
            send(f"prepare {self.full} as {_read(self.statement)[0]}", {})
        except Error:
            if on.closed:
                raise
            # Whatever it is, the statement itself tells better.
            on.prepared = None
            return False
        on.prepared.add(self.full)
        return True


@cache
def _read(statement: str) -> tuple[str, str]:
    """Return the statement with numbered values, and what stands for these in an execution."""
    names = list(dict.fromkeys(VALUE.findall(statement)))
    given = ", ".join(f"%({name})s" for name in names)
    return VALUE.sub(lambda found: f"${names.index(found[1]) + 1}", statement), f"({given})" if names else ""
