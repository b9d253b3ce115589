"""The statement that claims, deletes, audits and counts a chunk of rows in one step.

Its common tables, in this order:

* ``claimed``: the oldest due rows, locked.  If bytes or following rows are limited, ``candidates`` are the locked rows
  and ``claimed`` the first of them within the limits.
* ``cascaded``: the rows that follow them by foreign keys.
* ``deleted``: the claimed rows that are still due.
* ``reached``: the last deleted or claimed row, beyond which the next chunk starts.
* ``also_0``, …: the statements of `Rows.also`.
* ``carried``, ``touched``, ``carried_0``, …: the rows that foreign keys delete or change with the deleted rows.
* the caller's tables, which audit and count.
* ``turns``, ``totals``, ``reduced`` and others: see `total_locks`.

``= any(array(...))`` is computed once.  ``in (select ... limit n)`` is not: under a nested loop PostgreSQL repeats the
subquery, finds other unlocked rows each time, and deletes them all.

A row that changes between our snapshot and our lock is locked with its new values.  The deletion repeats the condition,
so such a row stays unless it is still due.  In a table rows are deleted by place (`TargetRelation`), which is unique.
A view lacks places: its rows are deleted by key, and nothing is committed if these are more rows than keys.

Statistics may be outdated.  If few rows were due when the table was analyzed, PostgreSQL would read all due rows for
each chunk; with a plan from a time when the table was tiny it would read the whole table.  So the claim reads the index
in its order (`WALK_IN_ORDER`), and the deletion repeats the condition in a form that no index answers and finds its
rows by place or key.

Children lock a total one after another, so the totals are locked last: two processes then delete 1.75 times as much as
one, but 0.97 times if they lock the totals first (`python -m benchmarks artifacts_two`).  If another session has
locked a total by then, its rows are deleted already: the statement fails and is repeated with the totals first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import peewee as pw

from forgekeeper.api.answers import Rows, Total
from forgekeeper.audit.deletions import OTHER_COLUMN_PREFIX
from forgekeeper.engine.row_audit import write_audit_expressions
from forgekeeper.engine.total_locks import lock_all_totals, lock_free_totals, reduce_totals, write_owner_column
from forgekeeper.guards.preconditions import Blocked
from forgekeeper.platform.database import Base
from forgekeeper.platform.database.cascades import Cascades
from forgekeeper.platform.database.common_tables import CommonTable, write_statement
from forgekeeper.platform.database.naming import column_name, quote_name, relation_name, write_expression
from forgekeeper.platform.database.queries import START_POSITION, Position, key_condition
from forgekeeper.platform.database.relations import find_other_columns
from forgekeeper.platform.database.targets import TargetRelation

PLACEHOLDER_PATTERN = re.compile(r"%s|%%")
"""A value in the SQL of peewee, or an escaped percent sign."""
FOLLOWERS_PER_CANDIDATE = "(select root, count(*) as weight from cascaded group by root) as weighed on root = key"
"""Each candidate's number of rows that its deletion deletes or changes.  A row that follows two counts for each."""
REACHED_TABLE = CommonTable(
    "reached",
    """
        select _since as since, _key as key from deleted
        union all
        select since, key from claimed where not exists (select from deleted)
    """,
)
COUNT_DELETED_TUPLES = """(
        select coalesce(sum(pg_stat_get_xact_tuples_deleted(oid)), 0)::bigint from unnest(%(tables)s::oid[]) as oid
    )"""
"""Rows that this session has deleted from tables.

PostgreSQL counts them until it adds its figures to those of other sessions.
"""


@dataclass(frozen=True, kw_only=True)
class RowChunk:
    """At most *limit* due rows, the oldest beyond a position.

    *only* are the keys of the only rows that are claimed, *without* keys of rows that are not, *held_up* the owners of
    totals whose rows are not.  *bytes_left* and *rows_left* limit the sums of the claimed rows, rows that follow them
    included.  With *totals_first* the totals are locked before the deletion, and rows of totals that another session
    has locked stay; without it such a total fails the statement.
    """

    limit: int
    after: Position = START_POSITION
    only: Sequence[int] | None = None
    without: Sequence[int] = ()
    held_up: Sequence[int] = ()
    bytes_left: int | None = None
    rows_left: int | None = None
    totals_first: bool = False

    @property
    def sql_values(self) -> dict[str, Any]:
        """The values that the statements of the chunk name."""
        return vars(self) | self.after._asdict()


class ChunkResult(NamedTuple):
    """The row that the statement of a chunk returns, if it has claimed a row.

    *instant* and *key* are the position of the last row, *held_up* the owners of the totals that others have locked.
    *keys* belong to the deleted rows, None if nobody looks at them.  *followers* are places of ``cascades.models``,
    each with its number of rows.  *deleted_before* counts rows that the session had deleted before.
    """

    records: int
    bytes: int
    instant: str
    key: int
    held_up: Sequence[int]
    keys: Sequence[int] | None
    followers: Sequence[tuple[int, int]] | None
    deleted_before: int
    claimed: int


class RowStatements:
    """The statements that delete rows and that look at their sizes, and the *values* that they name.

    *audit* has the expressions of the columns that the audit keeps of each row, by name.

    Raises `Blocked` if PostgreSQL would delete or change rows with them that the answer does not name.
    """

    def __init__(self, rows: Rows[Any]) -> None:
        self.rows = rows
        self.target = TargetRelation.find(rows.model)
        self.cascades = Cascades.find(self.target, rows.cascades_to)
        if self.cascades.refusals:
            raise Blocked("schema", self.cascades.refusals[0])
        self._due, self.sql_values = write_condition(rows.model, rows.due_condition)
        self._also = list[CommonTable]()
        for number, each in enumerate(rows.also):
            name = f"also_{number}"
            text, values = name_parameters(each.sql, each.params or (), name=name)
            self._also.append(CommonTable(name, f"{text}\n        returning 1"))
            self.sql_values |= values
        self.sql_values |= {"tables": list(self.cascades.deleted_tables)} if self.has_followers else {}
        others = find_other_columns(rows.model) if rows.restorable else ()
        self.audit = write_audit_expressions(rows) | {f"{OTHER_COLUMN_PREFIX}{name}": _as_json(name) for name in others}
        self._table = relation_name(rows.model)
        self._since = column_name(rows.since)
        self._key = column_name(rows.model._meta.primary_key)
        partition = None if self.target.is_found_by_ctid else rows.model.partition
        self._partition_column = column_name(getattr(rows.model, partition)) if partition else None
        # In partitions or heirs a ctid is not unique.
        self._has_heirs = self.target.has_places and not self.target.is_single
        self._size = None if rows.size is None else write_bytes(rows.size)
        self._owner = None if rows.total is None else write_owner_column(rows.total)

    @property
    def has_followers(self) -> bool:
        """Whether rows that are counted follow the deleted ones."""
        return bool(self.cascades.links)

    @property
    def is_checked_by_keys(self) -> bool:
        """Whether the deletion may take several rows of a key, or report rows that are still there."""
        return bool(self.target.instead_rules) or not self.target.has_places

    def write_delete(self, chunk: RowChunk, recorded: Iterable[CommonTable] = ()) -> str:
        """Return the statement that deletes a chunk; the tables *recorded* audit and count."""
        total = self.rows.total
        tables = [
            *self._write_claim(chunk),
            *(lock_free_totals(total) if total and chunk.totals_first else ()),
            self._write_deletion(chunk),
            REACHED_TABLE,
            *self._also,
            *(self._find_carried() if self.has_followers else ()),
            *recorded,
            *(self._reduce_totals(total, chunk) if total else ()),
        ]
        return write_statement(tables, self._select_result(chunk))

    def write_size_query(self, chunk: RowChunk) -> str:
        """Return the statement for each row's key, bytes, and number of deleted or changed rows."""
        size = self._size or "0"
        if not self.has_followers:
            return self._select_due(f"{self._key}, {size}, 1", chunk)
        columns = {"key": self._key, "since": self._since, "size": size, "own": self.cascades.own_row_sql}
        due = self._select_due(write_columns(columns), chunk)
        candidates = CommonTable("candidates", due, is_materialized=True)
        sizes = f"select key, size, weight from candidates join {FOLLOWERS_PER_CANDIDATE} order by since, key"
        return write_statement([candidates, self.cascades.find_followers("candidates")], sizes)

    def _write_claim(self, chunk: RowChunk) -> Iterator[CommonTable]:
        """Yield the tables that lock the next due rows and find the rows that follow them."""
        limits = {}
        if chunk.bytes_left is not None:
            limits["size"] = "bytes_left"
        if chunk.rows_left is not None and self.has_followers:
            limits["weight"] = "rows_left"
        first = "candidates" if limits else "claimed"
        yield CommonTable(first, self._select_due(self._claimed_columns, chunk), is_materialized=True)
        if self.has_followers:
            yield self.cascades.find_followers(first)
        if limits:
            yield claim_within(limits)

    def _select_due(self, columns: str, chunk: RowChunk) -> str:
        conditions = key_condition(self._key, only=chunk.only, without=chunk.without)
        if self._owner and chunk.held_up:
            conditions += f" and ({self._owner} <> all(%(held_up)s)) is not false"
        return f"""
        select {columns} from {self._table}
        where {self._due} and ({self._since}, {self._key}) > (%(instant)s, %(key)s::bigint){conditions}
        order by {self._since}, {self._key}
        limit {chunk.limit}
        for update skip locked
    """

    def _write_deletion(self, chunk: RowChunk) -> CommonTable:
        """Return the table that deletes the claimed rows that are still due."""
        claimed = "claimed"
        if self._owner and chunk.totals_first:
            claimed += " where (owner <> all(array(select owner from held_up))) is not false"
        conditions = [
            f"{write_row_locator(self.target)} = any(array(select row from {claimed}))",
            *self._limit_partitions(claimed),
            f"({self._due}) is true",
        ]
        query = f"""
        delete from {self._table}
        where {" and ".join(conditions)}
        returning {self._deleted_columns}
    """
        return CommonTable("deleted", query)

    def _limit_partitions(self, claimed: str) -> Iterator[str]:
        """Yield conditions that let the deletion search only the claimed rows' partitions or heirs."""
        if self._has_heirs:
            # With "is true" PostgreSQL does not turn the subquery into a join: it hashes it once.
            place = f"({self.target.tableoid_sql}, {self.target.ctid_sql})"
            yield f"({place} in (select place, row from {claimed})) is true"
        if self._partition_column:
            # PostgreSQL skips partitions by bounds, not by an array.  Rows that become due together are neighbours.
            yield (
                f"{self._partition_column} between (select min(part) from claimed) and (select max(part) from claimed)"
            )

    @cached_property
    def _claimed_columns(self) -> str:
        columns = {
            "row": write_row_locator(self.target),
            "since": self._since,
            "key": self._key,
            "size": self._size,
            "owner": self._owner,
            "part": self._partition_column,
            "place": self.target.tableoid_sql if self._has_heirs else None,
            "own": self.cascades.own_row_sql if self.has_followers else None,
        }
        return write_columns(columns)

    @cached_property
    def _deleted_columns(self) -> str:
        """Our own columns, whose names begin with ``_``, and the model's for `Rows.also`."""
        rows = self.rows
        columns = {
            "_since": self._since,
            "_key": self._key,
            "_size": self._size,
            "_owner": self._owner,
            "_summed": None if rows.total is None or rows.size is None else write_size(rows.size),
            **{quote_name(one.column_name): column_name(one) for one in rows.model._meta.sorted_fields if self._also},
            "_named": None if rows.name is None else column_name(rows.name),
            **{f"_audit_{place}": value for place, value in enumerate(self.audit.values())},
            "_own": self.cascades.own_row_sql if self.has_followers else None,
        }
        return write_columns(columns)

    def _find_carried(self) -> Iterator[CommonTable]:
        """Yield the tables of the rows that foreign keys delete or change with the deleted rows, each row once."""
        carried = """
        select node, row, min(root) as root from cascaded
        where root = any(array(select _key from deleted)) and (node, row) not in (select 0, _own from deleted)
        group by node, row
    """
        size = "_size" if self._size else "0"
        yield CommonTable("carried", carried, is_materialized=True)
        yield CommonTable("touched", f"select {size} as _size from deleted union all select 0 from carried")
        for place in self.cascades.follower_verbs:
            yield CommonTable(f"carried_{place}", f"select row, root from carried where node = {place}")

    def _reduce_totals(self, total: Total, chunk: RowChunk) -> Iterator[CommonTable]:
        """Yield the tables that subtract the deleted bytes from the totals, which they lock unless that was first."""
        if not chunk.totals_first:
            yield from lock_all_totals(total, after=["deleted", *(each.name for each in self._also)])
        yield reduce_totals(total)

    def _select_result(self, chunk: RowChunk) -> str:
        """Return the query of the `ChunkResult`, with its columns in the order of the fields."""
        looks_for_locked = self._owner is not None and chunk.totals_first
        by_node = "(select node, count(*) as count from carried group by node) as counts"
        columns = {
            "records": "(select count(*) from deleted)",
            "bytes": "(select coalesce(sum(_size), 0)::bigint from deleted)" if self._size else "0",
            "instant": "since::text",
            "key": "key",
            "held_up": "array(select owner from held_up)" if looks_for_locked else "array[]::bigint[]",
            "keys": "array(select _key from deleted)" if self.is_checked_by_keys else "null",
            "followers": f"(select array_agg(array[node, count]) from {by_node})" if self.has_followers else "null",
            # Foreign keys delete after the statement.
            "deleted_before": COUNT_DELETED_TUPLES if self.has_followers else "0",
            "claimed": "(select count(*) from claimed)",
        }
        return f"select {write_columns(columns)} from reached order by reached.since desc, reached.key desc limit 1"


def claim_within(limits: Mapping[str, str]) -> CommonTable:
    """Return the table of the first candidates within *limits*: the values of the sums of some columns, by column."""
    source = f"candidates join {FOLLOWERS_PER_CANDIDATE}" if "weight" in limits else "candidates"
    sums = ", ".join(f"sum({column}) over (order by since, key) as sum_{column}" for column in limits)
    are_within = " and ".join(f"sum_{column} <= %({value})s::bigint" for column, value in limits.items())
    query = f"select * from (select candidates.*, {sums} from {source}) as added_up where {are_within}"
    return CommonTable("claimed", query, is_materialized=True)


def write_condition(model: type[Base], expression: pw.Node) -> tuple[str, dict[str, Any]]:
    """Return *expression* over the model's columns in SQL, with its values by name: all runs prepare one statement."""
    return name_parameters(*write_expression(model, expression), name="due")


def name_parameters(text: str, values: Sequence[Any], *, name: str) -> tuple[str, dict[str, Any]]:
    """Return SQL with its values called *name* and a number, and these."""
    numbers = iter(range(len(values)))

    def replace_placeholder(found: re.Match[str]) -> str:
        return found[0] if found[0] == "%%" else f"%({name}_{next(numbers)})s"

    return PLACEHOLDER_PATTERN.sub(replace_placeholder, text), {
        f"{name}_{number}": value for number, value in enumerate(values)
    }


def write_row_locator(target: TargetRelation) -> str:
    """Return how the deletion finds a row, in SQL: by its ctid in a table, by its key in a view."""
    (key,) = target.model._meta.get_primary_keys()
    return target.ctid_sql if target.has_places else column_name(key)


def write_columns(columns: Mapping[str, str | None]) -> str:
    """Return the list of columns of a query, in SQL: expressions by name, None for a column that it lacks."""
    return ", ".join(f"{value} as {name}" for name, value in columns.items() if value is not None)


def _as_json(name: str) -> str:
    """Return the value of a column of any type in SQL, as JSON in a text: an array would be one value for each row."""
    return f"coalesce(to_jsonb({quote_name(name)})::text, 'null')".replace("%", "%%")


def write_bytes(size: pw.Field[Any]) -> str:
    """Return a row's bytes for limits, results and previews, in SQL: a negative size is 0, it gives no bytes back."""
    return f"greatest({write_size(size)}, 0)::bigint"


def write_size(size: pw.Field[Any]) -> str:
    """Return a row's bytes for a `Total`, in SQL: the forge has added a negative size, too."""
    return f"coalesce({column_name(size)}, 0)"
