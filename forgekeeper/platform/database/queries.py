"""Results of queries: counts up to a bound, and rows in chunks and pages."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from tempfile import SpooledTemporaryFile
from typing import Any, NamedTuple, TypeAlias

import peewee as pw

from forgekeeper.platform.database import Base, database
from forgekeeper.platform.database.naming import relation_name
from forgekeeper.platform.database.read_only import as_read_only

MAX_COUNTED_ROWS = 100_001
"""Maximum count, in rows.  Larger counts are shown as a hundred thousand and more: they are read every few seconds."""

MAX_SAMPLED_PAGES = 16_384
"""Maximum pages of a table to count (128 MiB).  A larger table is estimated from a sample of this many pages."""
# The pages of a table with its partitions; null for a view.
SELECT_PAGE_COUNT = """
    select case when relkind in ('r', 'm', 'p') then (
        select sum(pg_relation_size(part)) from (
            select oid as part union select relid from pg_partition_tree(oid)
        ) as parts
    ) / current_setting('block_size')::float end
    from pg_class where oid = to_regclass(%s)
"""
COUNT_SAMPLE = "select count(*) from {} tablesample system (%s)"

WALK_IN_ORDER = "set local enable_bitmapscan = off; set local enable_seqscan = off; "
"""Sent before a statement that claims a chunk: it walks the index in order, whatever the statistics say."""

# Collecting the rows may take longer than the usual limit of a statement.  The planner underestimates the number of
# elements of an array or a document, and a nested loop would look up millions of rows one by one.
CURSOR_SETTINGS = "set local statement_timeout = '1h'; set local enable_nestloop = off"
MAX_SPOOLED_BYTES = 8 * 1024 * 1024
"""Bytes of pages that are stored in memory; more are stored in a temporary file."""


def count_bounded(query: pw.ModelSelect[Any]) -> int:
    """Count the rows of *query*, up to `MAX_COUNTED_ROWS`."""
    counted: int = query.limit(MAX_COUNTED_ROWS).count()
    return counted


class AffectedShare(NamedTuple):
    """Counts of a batch, each up to a bound: *due* rows that runs would delete, of the *total* of rows."""

    due: Callable[[int], int]
    total: Callable[[int], int]

    @classmethod
    def from_queries(cls, *queries: pw.ModelSelect[Any], further_models: tuple[type[Base], ...] = ()) -> AffectedShare:
        """Count the rows of *queries*, and all rows of their tables and of the *further_models*."""
        models = (*(query.model for query in queries), *further_models)
        return cls(
            lambda bound: _count_up_to(queries, bound),
            lambda bound: count_rows(models, bound),
        )


AffectedShareReader: TypeAlias = Callable[[datetime], AffectedShare]


def share_as_read_only(reader: str, ask: AffectedShareReader) -> AffectedShareReader:
    """Return *ask* as a look; the counts of the returned `AffectedShare` are looks of their own."""
    asked = as_read_only(reader, ask)

    def read_share(instant: datetime) -> AffectedShare:
        stake = asked(instant)
        return AffectedShare(as_read_only(reader, stake.due), as_read_only(reader, stake.total))

    return read_share


def _count_up_to(queries: tuple[pw.ModelSelect[Any], ...], bound: int) -> int:
    found = 0
    for query in queries:
        key = query.model._meta.primary_key
        found += query.select(key).limit(bound - found).count() if found < bound else 0
    return found


def count_rows(models: Sequence[type[Base]], bound: int) -> int:
    """Return the total number of rows of the models' tables."""
    return sum(_estimate_rows(model, bound) for model in models)


def _estimate_rows(model: type[Base], bound: int) -> int:
    """Return the number of live rows of a table.

    PostgreSQL's own estimate is not used: an `update` of all rows doubles it.  A large table is estimated from a sample
    of its pages, and a view is counted up to the bound.
    """
    table = relation_name(model)
    (pages,) = database.execute_sql(SELECT_PAGE_COUNT, (table,)).fetchone() or (None,)
    if pages is None:
        return _count_up_to((model.select(),), bound)
    share: float = MAX_SAMPLED_PAGES / max(pages, MAX_SAMPLED_PAGES)
    rows: int = database.execute_sql(COUNT_SAMPLE.format(table), (100 * share,)).fetchone()[0]
    return round(rows / share)


class Position(NamedTuple):
    """The position of a run: an instant, as PostgreSQL's text, and a key.

    Python cannot represent all of PostgreSQL's instants.
    """

    instant: str
    key: int


START_POSITION = Position("-infinity", -(2**63) + 1)
"""The position before every row.  PostgreSQL would not parse a smaller key as a bigint."""


def list_positions(
    query: pw.ModelSelect[Any], by: pw.Field[Any], after: Position, *, limit: int, without: Collection[int] = ()
) -> list[Position]:
    """Return the positions of the next rows of *query* after *after*, ordered by *by* and key.

    With an index of both columns the cost does not grow with the position.  The table's key must be one number.
    """
    key = query.model._meta.primary_key
    beyond = pw.Tuple(by, key) > pw.Tuple(pw.SQL("%s", [after.instant]), after.key)
    rows = query.select(by.cast("text"), key).where(beyond).order_by(by, key).limit(limit)
    if without:
        rows = rows.where(key.not_in(list(without)))
    return [Position(*row) for row in rows.tuples()]


def filter_keys(query: pw.ModelSelect[Any], keys: Sequence[int]) -> set[int]:
    """Return the subset of *keys* that *query* selects."""
    key = query.model._meta.primary_key
    return {found for (found,) in query.select(key).where(key.in_(list(keys))).tuples()}


class KeyPage(NamedTuple):
    """A page of at most *limit* items with keys above *after*.

    If *only* is given, other keys are left out.  *without* has the keys of bad records, which are left out, too.
    """

    limit: int
    after: int = 0
    only: Sequence[int] | None = None
    without: Collection[int] = ()


def key_condition(key: str, *, only: Sequence[int] | None = None, without: Collection[int] = ()) -> str:
    """Return the end of a condition: *key* is in *only*, if given, and not in *without*.

    Parts that are not needed are left out, so they cost nothing.  The statement's values are ``only`` and ``without``.
    """
    one_of = f" and {key} = any(%(only)s)" if only is not None else ""
    return one_of + (f" and {key} <> all(%(without)s)" if without else "")


def fetch_pages(name: str, statement: str, values: Mapping[str, Any], *, size: int) -> Iterator[list[tuple[Any, ...]]]:
    """Yield the present rows of *statement* in pages of up to *size* rows.

    *name* is the cursor's name, unique in the session.  No transaction stays open between pages: PostgreSQL stores the
    rows, if necessary on disk, until the cursor is closed or the session ends.  Through a pooler, which may give each
    transaction another session, they are stored here.
    """
    if not database.connection().is_pooled:
        yield from _fetch_from_cursor(name, "with hold", statement, values, size)
        return
    with SpooledTemporaryFile(MAX_SPOOLED_BYTES) as file:
        with database.atomic():
            for page in _fetch_from_cursor(name, "without hold", statement, values, size):
                pickle.dump(page, file)
        pickle.dump([], file)
        file.seek(0)
        while page := pickle.load(file):  # noqa: S301, nobody else writes to the file
            yield page


def _fetch_from_cursor(
    name: str, hold: str, statement: str, values: Mapping[str, Any], size: int
) -> Iterator[list[tuple[Any, ...]]]:
    with database.atomic():
        database.execute_sql(CURSOR_SETTINGS)
        database.execute_sql(f"declare {name} no scroll cursor {hold} for {statement}", values)
    try:
        while page := database.execute_sql(f"fetch {size} from {name}").fetchall():
            yield page
    finally:
        with suppress(pw.PeeweeException):
            database.execute_sql(f"close {name}")
