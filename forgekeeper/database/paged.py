"""Rows of a statement, a page at a time, without a transaction that waits for their reader.

PostgreSQL keeps the rows, on disk if they are many, until they are closed or the session ends.  A pooler that gives
each transaction another session cannot be in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import peewee as pw

from forgekeeper.database import database

# To collect the rows may take longer than a statement usually may.  The planner knows nothing of how many there are in
# an array or a document, and takes them for few: row by row it would look for millions.
PLAN = "set local statement_timeout = '1h'; set local enable_nestloop = off; set local jit = off"


class Paged:
    """The rows of a statement, as they were when it was executed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __len__(self) -> int:
        """Return how many there are."""
        self._rewind()
        count: int = database.execute_sql(f"move forward all in {self._name}").rowcount
        return count

    def pages(self, size: int) -> Iterator[list[tuple[Any, ...]]]:
        """Yield all rows from the first on, up to *size* at a time."""
        self._rewind()
        while page := database.execute_sql(f"fetch forward {size:d} from {self._name}").fetchall():
            yield page

    def _rewind(self) -> None:
        database.execute_sql(f"move absolute 0 in {self._name}")


@contextmanager
def paged(name: str, statement: str, values: Mapping[str, Any]) -> Iterator[Paged]:
    """Execute *statement*, and let its rows be read; *name* is unique in the session."""
    # In one request, which is a transaction of its own.
    database.execute_sql(f"{PLAN}; declare {name} scroll cursor with hold for {statement}", values)
    try:
        yield Paged(name)
    finally:
        with suppress(pw.PeeweeException):
            database.execute_sql(f"close {name}")
