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
    known, idle = connection.prepared, connection.get_transaction_status() == TRANSACTION_STATUS_IDLE
    full = f"{name}_{md5(statement.encode(), usedforsecurity=False).hexdigest()[:8]}"
    if known is not None and idle and (full in known or len(known) < MOST):
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
    return database.execute_sql(first + statement, values)


@cache
def _numbered(statement: str) -> tuple[str, str]:
    """Return the statement with numbered values, and what stands for these in an execution."""
    names = list(dict.fromkeys(VALUE.findall(statement)))
    given = ", ".join(f"%({name})s" for name in names)
    return VALUE.sub(lambda found: f"${names.index(found[1]) + 1}", statement), f"({given})" if names else ""
