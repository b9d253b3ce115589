"""Rows of a statement, a page at a time, without a transaction that waits for their reader.

PostgreSQL keeps the rows, on disk if they are many, until they are closed or the session ends.  A pooler that gives
each transaction another session cannot be in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import psycopg2

from forgekeeper.database import database

# To collect the rows may take longer than a statement usually may.  The planner knows nothing of how many there are in
# an array or a document, and takes them for few: row by row it would look for millions.
PLAN = "set local statement_timeout = '1h'; set local enable_nestloop = off; set local jit = off"


def pages(name: str, statement: str, values: Mapping[str, Any], *, size: int) -> Iterator[list[tuple[Any, ...]]]:
    """Yield the rows of *statement* as they are now, up to *size* at a time; *name* is unique in the session."""
    cursor = database.connection().cursor(name, withhold=True)
    with database.atomic():
        database.execute_sql(PLAN)
        cursor.execute(statement, values)
    try:
        while page := cursor.fetchmany(size):
            yield page
    finally:
        with suppress(psycopg2.Error):
            cursor.close()
