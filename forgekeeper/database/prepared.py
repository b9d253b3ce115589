"""Statements that the server has read and planned once for a connection, instead of for each chunk.

psycopg2 prepares none, so this is ``PREPARE`` and ``EXECUTE``.  Planned for each chunk, a run took a third longer:
`python -m benchmarks statuses`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from hashlib import md5
from typing import Any

import peewee as pw
from psycopg2.extensions import TRANSACTION_STATUS_IDLE

from forgekeeper.database import database, sqlstate
from forgekeeper.database.sessions import Connection

MOST = 50
"""So many statements are prepared on a connection."""
GONE = {"26000", "42P05", "0A000"}
"""Not there, there already, or of another result now: a pooler has given us another session, or a table has changed."""
VALUE = re.compile(r"%\((\w+)\)s")


def execute(name: str, statement: str, values: Mapping[str, Any], *, first: str = "") -> Any:
    """Execute *statement*, prepared by that *name* and a part of its hash; *first* stands before it in the request.

    Where it cannot be prepared, as within a transaction of the caller's, the statement itself is executed.  A value
    whose type PostgreSQL cannot infer from where it stands needs a cast.
    """
    connection = database.connection()
    full = f"{name}_{md5(statement.encode(), usedforsecurity=False).hexdigest()[:8]}"
    if not _is_prepared(connection, full, statement):
        return database.execute_sql(first + statement, values)
    try:
        return database.execute_sql(f"{first}execute {full}{_numbered(statement)[1]}", values)
    except pw.PeeweeException as error:
        if sqlstate(error) not in GONE or connection.closed:
            raise
        connection.prepared = None
        return database.execute_sql(first + statement, values)


def _is_prepared(connection: Connection, full: str, statement: str) -> bool:
    """Say whether the statement is, or could be now, prepared on that connection."""
    if connection.prepared is None or connection.get_transaction_status() != TRANSACTION_STATUS_IDLE:
        return False
    if full in connection.prepared:
        return True
    if len(connection.prepared) >= MOST:
        return False
    try:
        database.execute_sql(f"prepare {full} as {_numbered(statement)[0]}", {})
    except pw.PeeweeException:
        if connection.closed:
            raise
        # The statement itself will say what is wrong.
        connection.prepared = None
        return False
    connection.prepared.add(full)
    return True


@cache
def _numbered(statement: str) -> tuple[str, str]:
    """Return the statement with numbered values, and what stands for these in an execution."""
    names = list(dict.fromkeys(VALUE.findall(statement)))
    given = ", ".join(f"%({name})s" for name in names)
    return VALUE.sub(lambda found: f"${names.index(found[1]) + 1}", statement), f"({given})" if names else ""
