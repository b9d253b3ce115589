"""Chunks of what a query selects: rows of a table with a key of its own, one of numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import peewee as pw

from forgekeeper.database import LOWEST, database


class Position(NamedTuple):
    """Where a run has got to, by an instant and a key; the instant as PostgreSQL writes it: Python holds not all."""

    instant: str
    key: int


START = Position("-infinity", LOWEST)
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
    rows = _without(query, without).select(by.cast("text"), key).where(beyond).order_by(by, key).limit(limit).tuples()
    return [Position(*row) for row in rows]


def delete(
    query: pw.ModelSelect[Any],
    *,
    limit: int,
    only: Sequence[int] | None = None,
    without: Collection[int] = (),
    gone: Callable[[Sequence[int]], object] | None = None,
) -> int:
    """Delete up to *limit* of the rows that *query* selects, of *only* these, *without* those; return how many.

    Rows that another transaction has locked are passed over, not waited for.  *gone* is told their keys, if there are
    any, in the same transaction: what it raises lets them stay.
    """
    model, key = query.model, query.model._meta.primary_key
    if only is not None:
        query = query.where(key.in_(list(only)))
    claimed = _without(query, without).limit(limit).for_update(skip_locked=True)
    # Computed once: ``in (select ... limit n)`` may be repeated, and would then delete more than *limit*.
    deletion = model.delete().where(key == pw.fn.any(pw.fn.array(claimed)))
    if gone is None:
        return int(deletion.execute())
    with database.atomic():
        keys = [found for (found,) in deletion.returning(key).tuples().execute()]
        if keys:
            gone(keys)
    return len(keys)


def first(query: pw.ModelSelect[Any], *, limit: int, without: Collection[int] = ()) -> list[int]:
    """Return the keys of what `delete` would delete, locked or not."""
    return [key for (key,) in _without(query, without).limit(limit).tuples()]


def among(query: pw.ModelSelect[Any], keys: Sequence[int]) -> set[int]:
    """Return those of *keys* that *query* selects."""
    key = query.model._meta.primary_key
    return {found for (found,) in query.select(key).where(key.in_(list(keys))).tuples()}


def _without(query: pw.ModelSelect[Any], without: Collection[int]) -> pw.ModelSelect[Any]:
    key = query.model._meta.primary_key
    return query.select(key).where(key.not_in(list(without))) if without else query.select(key)
