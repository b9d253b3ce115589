"""Common tables: the named queries in the ``with`` clause of a statement."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class CommonTable(NamedTuple):
    """A named query, in SQL.  The *name* of a recursive query includes the names of its columns.

    PostgreSQL runs a *materialized* query once, before any query that reads it.
    """

    name: str
    query: str
    is_materialized: bool = False
    is_recursive: bool = False

    def __str__(self) -> str:
        hint = " materialized" if self.is_materialized else ""
        return f"{self.name} as{hint} ({self.query})"


def append_tables(tables: Iterable[CommonTable]) -> str:
    """Return the SQL of *tables* that follow another common table."""
    return "".join(f", {table}" for table in tables)


def write_statement(tables: Iterable[CommonTable], select: str) -> str:
    """Return a statement of common tables and the query that reads them."""
    first, *others = tables
    recursive = "recursive " if any(table.is_recursive for table in (first, *others)) else ""
    return f"with {recursive}{first}{append_tables(others)}\n{select}"
