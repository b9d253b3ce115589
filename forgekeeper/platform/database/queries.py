"""What queries select: how much of it there is, counted up to a bound, and its rows by chunks and pages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias

import peewee as pw
import psycopg2

from forgekeeper.platform.database import Base, database
from forgekeeper.platform.database.looking import as_look
from forgekeeper.platform.database.naming import relation_name

BOUND = 100_001
"""What is more is shown as a hundred thousand and more: it is asked every few seconds."""

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

IN_ORDER = "set local enable_bitmapscan = off; set local enable_seqscan = off; "
"""Stands before a statement that claims a chunk: it takes the index in its order, whatever the statistics say."""

# To collect the rows may take longer than a statement usually may.  The planner knows nothing of how many there are in
# an array or a document, and takes them for few: row by row it would look for millions.
PLAN = "set local statement_timeout = '1h'; set local enable_nestloop = off"


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
        return cls(
            lambda bound: _count(queries, bound),
            lambda bound: count_rows(models, bound),
        )


AtStake: TypeAlias = Callable[[datetime], Stake]


def stake_as_look(whose: str, ask: AtStake) -> AtStake:
    """Return *ask* as a look, and the counts that it returns as looks of their own."""
    asked = as_look(whose, ask)

    def look(instant: datetime) -> Stake:
        stake = asked(instant)
        return Stake(as_look(whose, stake.due), as_look(whose, stake.of))

    return look


def _count(queries: tuple[pw.ModelSelect[Any], ...], bound: int) -> int:
    found = 0
    for query in queries:
        key = query.model._meta.primary_key
        found += query.select(key).limit(bound - found).count() if found < bound else 0
    return found


def count_rows(models: Sequence[type[Base]], bound: int) -> int:
    """Say how many rows the tables of the models have together."""
    return sum(_rows_of(model, bound) for model in models)


def _rows_of(model: type[Base], bound: int) -> int:
    """Say how many rows the table has: those that live, as an `update` of all of them doubles what is estimated.

    A large table is judged by some of its pages, and a view is counted up to the bound.
    """
    table = relation_name(model)
    (pages,) = database.execute_sql(SIZE, (table,)).fetchone() or (None,)
    if pages is None:
        return _count((model.select(),), bound)
    share: float = PAGES / max(pages, PAGES)
    rows: int = database.execute_sql(SAMPLED.format(table), (100 * share,)).fetchone()[0]
    return round(rows / share)


class Position(NamedTuple):
    """Where a run has got to, by an instant and a key; the instant as PostgreSQL writes it: Python holds not all."""

    instant: str
    key: int


START = Position("-infinity", -(2**63) + 1)
"""Before every row; a number less would be no bigint to PostgreSQL when it reads it."""


def positions(
    query: pw.ModelSelect[Any], by: pw.Field[Any], after: Position, *, limit: int, without: Collection[int] = ()
) -> list[Position]:
    """Return the positions of the next rows that *query* selects beyond *after*, by that instant and their keys.

    It is one look into an index of both, however far the run has got.  The table's key is one number.
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


class Page(NamedTuple):
    """Up to *limit* items: with keys above *after*, *only* some keys if given, *without* those of bad records."""

    limit: int
    after: int = 0
    only: Sequence[int] | None = None
    without: Collection[int] = ()


def chosen(key: str, *, only: Sequence[int] | None = None, without: Collection[int] = ()) -> str:
    """Return a condition's end: *key* is one of *only*, if there are such, and none of *without*.

    What is not asked for is not in the statement: it costs nothing.  The values are ``only`` and ``without``.
    """
    one_of = f" and {key} = any(%(only)s)" if only is not None else ""
    return one_of + (f" and {key} <> all(%(without)s)" if without else "")


def pages(name: str, statement: str, values: Mapping[str, Any], *, size: int) -> Iterator[list[tuple[Any, ...]]]:
    """Yield the rows of *statement* as they are now, up to *size* at a time; *name* is unique in the session.

    No transaction waits for the reader: PostgreSQL keeps the rows, on disk if they are many, until they are closed or
    the session ends.  A pooler that gives each transaction another session cannot be in between.
    """
    # What the server refuses is an error of peewee's, as it is everywhere else.
    with pw.__exception_wrapper__:  # type: ignore[attr-defined]
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
