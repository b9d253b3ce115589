"""The statement by which a chunk of rows goes: claimed, deleted, written into the audit and counted in one step.

``= any(array(...))`` is computed once.  ``in (select ... limit n)`` is not: under a nested loop PostgreSQL repeats the
subquery, finds other unlocked rows each time, and deletes them all.

A row that changes between our snapshot and our lock is locked as it is then; the condition is repeated where rows are
deleted, so that one which is not due any more stays.  By ctid it is a third faster, but only in one ordinary table is
that a key: rows of two partitions have the same, and a view has none (`ORDINARY`).

The position's key is a bigint whatever the column is: the first one lies below every integer.

Statistics may be stale: where few were due when the table was analyzed, PostgreSQL would read all that are due for
each chunk; by a plan that was made while the table was tiny it would read the table.  So the claim takes the index in
its order (`IN_ORDER`), and the repeated condition is of a form that no index answers: the deletion goes by its key.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any, NamedTuple

from forgekeeper.database import chosen, database
from forgekeeper.declaring.rows import Rows
from forgekeeper.deleting.sql import column, condition

CHUNK = """
    with {first} as materialized (
        select {row} as row, {since} as since, {key} as key{size} from "{table}"
        where {due} and ({since}, {key}) > (%(instant)s, %(key)s::bigint){chosen}
        order by {since}, {key}
        limit {limit}
        for update skip locked
    ){within}, deleted as (
        delete from "{table}"
        where {row} = any(array(select row from claimed)) and ({due}) is true
        returning {since} as since, {key} as key{columns}
    ), reached as (
        select since, key from deleted
        union all
        select since, key from claimed where not exists (select from deleted)
    ){recorded}
    select (select count(*) from deleted), {bytes}, since::text, key from reached
    order by reached.since desc, reached.key desc limit 1
"""
# Where bytes are limited, of what was claimed the first that keep within what is left.
WITHIN = """, claimed as materialized (
        select row, since, key from (
            select row, since, key, sum(size) over (order by since, key) as total from candidates
        ) as added_up where total <= %(room)s::bigint
    )"""
# What could be claimed next, as far as it is not locked; nothing stays locked.
SIZES = """
    select {size} from "{table}"
    where {due} and ({since}, {key}) > (%(instant)s, %(key)s::bigint){chosen}
    order by {since}, {key}
    limit {limit}
    for update skip locked
"""
# The table is proved to be an ordinary one.
ORDINARY = """
    select relkind = 'r' and not relispartition and has_table_privilege(oid, 'select')
        and not exists (select from pg_inherits where inhparent = oid)
    from pg_class where oid = to_regclass(%s)
"""


class Shape(NamedTuple):
    """What a chunk's statement depends on besides the rows: it is put together once for each."""

    limit: int
    only: bool = False
    without: bool = False
    room: bool = False
    recorded: str = ""


class Composed:
    """The statements of the rows that a run deletes; *condition* is what makes one of them due."""

    def __init__(self, rows: Rows[Any]) -> None:
        self.rows = rows
        self.condition = condition(rows.model, rows.where)
        self._row = row_of(rows)
        self._text = cache(self._compose)

    def text(self, shape: Shape) -> str:
        """Return the statement of a chunk."""
        return self._text(shape)

    def sizes(self, limit: int, without: Collection[int]) -> str:
        """Return the statement that says how large the next rows are."""
        rows, key = self.rows, column(self.rows.model._meta.primary_key)
        return SIZES.format(
            size="0" if rows.size is None else f"greatest(coalesce({column(rows.size)}, 0), 0)::bigint",
            since=column(rows.since),
            key=key,
            table=rows.model._meta.table_name,
            due=self.condition.text,
            chosen=chosen(key, without=without),
            limit=limit,
        )

    def _compose(self, shape: Shape) -> str:
        rows, key = self.rows, column(self.rows.model._meta.primary_key)
        size = "" if rows.size is None else f", coalesce({column(rows.size)}, 0) as size"
        audited = "".join(f", {value} as {name}" for name, value in audited_columns(rows).items())
        return CHUNK.format(
            first="candidates" if shape.room else "claimed",
            within=WITHIN if shape.room else "",
            row=self._row,
            since=column(rows.since),
            key=key,
            size=size,
            table=rows.model._meta.table_name,
            due=self.condition.text,
            chosen=chosen(key, only=[] if shape.only else None, without=[0] if shape.without else ()),
            limit=shape.limit,
            columns=size + audited,
            recorded=shape.recorded,
            bytes="0" if rows.size is None else "(select coalesce(sum(size), 0)::bigint from deleted)",
        )


def audited_columns(rows: Rows[Any]) -> dict[str, str]:
    """Return what the audit keeps besides id and due: an expression over the deleted row for each name."""
    named = {} if rows.name is None else {"named": column(rows.name)}
    return named | {f"audit_{name}": value for name, value in rows.audit.items()}


def row_of(rows: Rows[Any]) -> str:
    """Return what tells the rows of a statement apart: ctid in an ordinary table, else the key."""
    table = rows.model._meta.table_name
    row = database.execute_sql(ORDINARY, (table,)).fetchone()
    return f'"{table}".ctid' if row and row[0] else column(rows.model._meta.primary_key)
