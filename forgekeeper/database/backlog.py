"""How much is due, since when, and of how much: counted up to a bound, as it is asked every few seconds."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeAlias

import peewee as pw

from forgekeeper.database import Base, database

BOUND = 100_001
"""What is more is shown as a hundred thousand and more."""
NO_TIME = timedelta(0)

PAGES = 16_384
"""A table of no more pages is counted (128 MiB); of a larger one so many are looked at, of all of it."""

# How many pages a table has, its partitions included; null where it is none, but a view.
SIZE = """
    select case when relkind in ('r', 'm', 'p') then (
        select sum(pg_relation_size(part)) from (
            select oid as part union select relid from pg_partition_tree(oid)
        ) as parts
    ) / current_setting('block_size')::float end
    from pg_class where oid = to_regclass(%s)
"""
SAMPLED = "select count(*) from {} tablesample system (%s)"


class Backlog(NamedTuple):
    """How many records are due, at most `BOUND`, and when the oldest became due."""

    records: int
    oldest: datetime | None = None

    @classmethod
    def of(cls, query: pw.ModelSelect[Any], *, oldest: pw.Field[Any], after: timedelta = NO_TIME) -> Backlog:
        """Count what *query* selects; each became due at the instant in that field, or so much *after* it.

        Without an order the oldest is that of those which were counted.
        """
        found = query.select(oldest.alias("due")).limit(BOUND)
        row = pw.Select([found], [pw.fn.count(pw.SQL("1")), pw.fn.min(found.c.due)]).bind(database).tuples().execute()
        records, instant = row[0]
        return cls(records, instant and instant + after)


def count(query: pw.ModelSelect[Any]) -> int:
    """Count what *query* selects, up to the bound."""
    counted: int = query.limit(BOUND).count()
    return counted


class Stake(NamedTuple):
    """Of a batch: *due* counts what its runs would delete, *of* what there is; either up to a bound."""

    due: Callable[[int], int]
    of: Callable[[int], int]

    @classmethod
    def rows(cls, *queries: pw.ModelSelect[Any], of: tuple[type[Base], ...] = ()) -> Stake:
        """Count the rows that *queries* select, of the tables of their models and of those named."""
        models = (*(query.model for query in queries), *of)
        return cls(lambda bound: _count(queries, bound), lambda bound: _rows(models, bound))


AtStake: TypeAlias = Callable[[datetime], Stake]


def _count(queries: tuple[pw.ModelSelect[Any], ...], bound: int) -> int:
    found = 0
    for query in queries:
        key = query.model._meta.primary_key
        found += query.select(key).limit(bound - found).count() if found < bound else 0
    return found


def _rows(models: tuple[type[Base], ...], bound: int) -> int:
    """Say how many rows the tables have: those that live, as an `update` of all of them doubles what is estimated.

    A large table is judged by some of its pages, and a view is counted up to the bound.
    """
    return sum(_live(model, bound) for model in models)


def _live(model: type[Base], bound: int) -> int:
    (pages,) = database.execute_sql(SIZE, (model._meta.table_name,)).fetchone() or (None,)
    if pages is None:
        return _count((model.select(),), bound)
    share: float = PAGES / max(pages, PAGES)
    rows: int = database.execute_sql(SAMPLED.format(model._meta.table_name), (100 * share,)).fetchone()[0]
    return round(rows / share)
