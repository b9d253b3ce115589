"""Chunks of what a query selects: rows of a table with a key of its own, one of numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import peewee as pw


def delete(
    query: pw.ModelSelect[Any], *, limit: int, only: Sequence[int] | None = None, without: Collection[int] = ()
) -> int:
    """Delete up to *limit* of the rows that *query* selects, of *only* these, *without* those; return how many.

    Rows that another transaction has locked are passed over, not waited for.
    """
    model, key = query.model, query.model._meta.primary_key
    if only is not None:
        query = query.where(key.in_(list(only)))
    claimed = _without(query, without).limit(limit).for_update(skip_locked=True)
    # Computed once: ``in (select ... limit n)`` may be repeated, and would then delete more than *limit*.
    return int(model.delete().where(key == pw.fn.any(pw.fn.array(claimed))).execute())


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
