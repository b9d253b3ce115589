"""Chunks of what a query selects: rows of a table with a key of its own, one of numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import peewee as pw


class Position(NamedTuple):
    """Where a run has got to, by an instant and a key; the instant as PostgreSQL writes it: Python holds not all."""

    instant: str
    key: int


START = Position("-infinity", -(2**63) + 1)
"""Before every row; a number less would be no bigint to PostgreSQL when it reads it."""
IN_ORDER = "set local enable_bitmapscan = off; set local enable_seqscan = off; "
"""Stands before a statement that claims a chunk: it takes the index in its order, whatever the statistics say."""


def page(
    query: pw.ModelSelect[Any], by: pw.Field[Any], after: Position, *, limit: int, without: Collection[int] = ()
) -> list[Position]:
    """Return the positions of the next rows that *query* selects beyond *after*, by that instant and their keys.

    It is one look into an index of both, however far the run has got.
    """
    key = query.model._meta.primary_key
    beyond = pw.Tuple(by, key) > pw.Tuple(pw.SQL("%s", [after.instant]), after.key)
    rows = query.select(by.cast("text"), key).where(beyond).order_by(by, key).limit(limit)
    if without:
        rows = rows.where(key.not_in(list(without)))
    return [Position(*row) for row in rows.tuples()]


def among(query: pw.ModelSelect[Any], keys: Sequence[int]) -> set[int]:
    """Return those of *keys* that *query* selects."""
    key = query.model._meta.primary_key
    return {found for (found,) in query.select(key).where(key.in_(list(keys))).tuples()}
