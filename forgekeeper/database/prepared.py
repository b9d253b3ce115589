"""Statements that the server has read and planned once for a connection, instead of for each chunk anew.

psycopg2 prepares none, so this is ``PREPARE`` and ``EXECUTE``.  Whether a statement is prepared is a matter of speed
alone: where it cannot be, or is not there any more, the statement itself is executed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from hashlib import md5
from typing import Any

import peewee as pw
from psycopg2.extensions import TRANSACTION_STATUS_IDLE

from forgekeeper.database import database, reachable, sqlstate
from forgekeeper.database.watch import Connection

MOST = 50
"""So many statements are prepared on a connection; a loop has one, and a few where it passes over bad records."""
GONE = {"26000", "42P05", "0A000"}
"""Not there, there already, or of another result now: a pooler has given us another session, or a table has changed."""
VALUE = re.compile(r"%\((\w+)\)s")


def execute(name: str, statement: str, values: Mapping[str, Any], *, first: str = "") -> Any:
    """Execute a statement with these values, as ``database.execute_sql`` does; return its cursor.

    On a connection that executes it again it is prepared, by that *name* and a part of its hash.  *first* stands before
    it in the same request, and so in the same transaction.  Within a transaction of the caller's nothing is prepared:
    what failed there could not be executed once more.

    A value that PostgreSQL cannot tell the type of from where it stands needs a cast.
    """
    full = f"{name}_{md5(statement.encode(), usedforsecurity=False).hexdigest()[:8]}"
    if not _is_prepared(full, statement):
        return database.execute_sql(first + statement, values)
    try:
        return database.execute_sql(f"{first}execute {full}{_read(statement)[1]}", values)
    except pw.PeeweeException as error:
        if sqlstate(error) not in GONE or not reachable():
            raise
        database.connection().prepared = None
        return database.execute_sql(first + statement, values)


def _is_prepared(full: str, statement: str) -> bool:
    """Say whether it is, or could be now, prepared on this thread's connection."""
    connection = database.connection()
    if not isinstance(connection, Connection) or connection.get_transaction_status() != TRANSACTION_STATUS_IDLE:
        return False
    known = connection.prepared
    if known is None or full in known:
        return known is not None
    if len(known) >= MOST or database.in_transaction():
        return False
    try:
        database.execute_sql(f"prepare {full} as {_read(statement)[0]}")
    except pw.PeeweeException:
        if not reachable():
            raise
        # Whatever it is, the statement itself tells better.
        connection.prepared = None
        return False
    known.add(full)
    return True


@cache
def _read(statement: str) -> tuple[str, str]:
    """Return the statement with numbered values, and what stands for these in an execution."""
    names = list(dict.fromkeys(VALUE.findall(statement)))
    given = ", ".join(f"%({name})s" for name in names)
    return VALUE.sub(lambda found: f"${names.index(found[1]) + 1}", statement), f"({given})" if names else ""
