"""Rows of a statement, a page at a time, without a transaction that waits for their reader.

PostgreSQL keeps the rows, on disk if they are many, until they are closed or the session ends.  A pooler that gives
each transaction another session cannot be in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import psycopg2

from forgekeeper.database import database

# To collect the rows may take longer than a statement usually may.  The planner knows nothing of how many there are in
# an array or a document, and takes them for few: row by row it would look for millions.
PLAN = "set local statement_timeout = '1h'; set local enable_nestloop = off; set local jit = off"


class Paged:
    """The rows of a statement, as they were when it was executed."""

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor

    def __len__(self) -> int:
        """Return how many there are."""
        count: int = database.execute_sql(
            f"move absolute 0 in {self._cursor.name}; move all in {self._cursor.name}"
        ).rowcount
        return count

    def pages(self, size: int) -> Iterator[list[tuple[Any, ...]]]:
        """Yield all rows from the first on, up to *size* at a time."""
        self._cursor.scroll(0, mode="absolute")
        while page := self._cursor.fetchmany(size):
            yield page


@contextmanager
def paged(name: str, statement: str, values: Mapping[str, Any]) -> Iterator[Paged]:
    """Execute *statement*, and let its rows be read; *name* is unique in the session."""
    cursor = database.connection().cursor(name, withhold=True, scrollable=True)
    with database.atomic():
        database.execute_sql(PLAN)
        cursor.execute(statement, values)
    try:
        yield Paged(cursor)
    finally:
        with suppress(psycopg2.Error):
            cursor.close()
