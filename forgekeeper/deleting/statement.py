"""The statement by which a chunk of rows goes: claimed, deleted, written into the audit and counted in one step.

``= any(array(...))`` is computed once.  ``in (select ... limit n)`` is not: under a nested loop PostgreSQL repeats the
subquery, finds other unlocked rows each time, and deletes them all.

A row that changes between our snapshot and our lock is locked as it is then; the condition is repeated where rows are
deleted, so that one which is not due any more stays.  By ctid it is a third faster, but only in one ordinary table is
that a key: rows of two partitions have the same, and a view has none (`ORDINARY`).

Statistics may be stale: where few were due when the table was analyzed, PostgreSQL would read all that are due for
each chunk; by a plan that was made while the table was tiny it would read the table.  So the claim takes the index in
its order (`IN_ORDER`), and the repeated condition is of a form that no index answers: the deletion goes by its key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forgekeeper.database import chosen, database
from forgekeeper.declaring.rows import Rows
from forgekeeper.deleting.sql import column, condition, named
from forgekeeper.deleting.total import owner, parts

CHUNK = """
    with {first} as materialized (
        select {row} as row, {since} as since, {key} as key{more} from "{table}"
        where {due} and ({since}, {key}) > (%(instant)s, %(key)s::bigint){chosen}
        order by {since}, {key}
        limit {limit}
        for update skip locked
    ){within}{locked_first}, deleted as (
        delete from "{table}"
        where {row} = any(array(select row from claimed{free})) and ({due}) is true
        returning {since} as _since, {key} as _key{columns}
    ), reached as (
        select _since as since, _key as key from deleted
        union all
        select since, key from claimed where not exists (select from deleted)
    ){also}{recorded}{locked_last}
    select (select count(*) from deleted), {bytes}, since::text, key, {held_up} from reached
    order by reached.since desc, reached.key desc limit 1
"""
# Where bytes are limited, of what was claimed the first that keep within what is left.
WITHIN = """, claimed as materialized (
        select * from (
            select *, sum(size) over (order by since, key) as total from candidates
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


class Composed:
    """The statements of the rows that a run deletes, and the *values* that they name."""

    def __init__(self, rows: Rows[Any]) -> None:
        self.rows = rows
        due = condition(rows.model, rows.due)
        also = [named(each.sql, each.params or (), name=f"also_{number}") for number, each in enumerate(rows.also)]
        self.values = due.values | {name: value for each in also for name, value in each.values.items()}
        self._also = {f"also_{number}": each.text for number, each in enumerate(also)}
        self._key = column(rows.model._meta.primary_key)
        self._names = {
            "since": column(rows.since),
            "key": self._key,
            "table": rows.model._meta.table_name,
            "due": due.text,
            "row": row_of(rows),
        }

    def text(
        self,
        limit: int,
        *,
        recorded: str = "",
        only: bool = False,
        without: bool = False,
        room: bool = False,
        held_up: bool = False,
        totals_first: bool = False,
    ) -> str:
        """Return the statement of a chunk of *limit* rows.

        *recorded* are the parts that write the audit and count.  *only* says that keys are named, *without* that some
        are left out, *room* that bytes are limited, *held_up* that totals are known to be locked.
        """
        rows = self.rows
        measured = {} if rows.size is None else {"size": f"coalesce({column(rows.size)}, 0)"}
        measured |= {} if rows.total is None else {"owner": owner(rows.total)}
        columns = {f"_{name}": value for name, value in measured.items()}
        columns |= {f'"{one.column_name}"': column(one) for one in rows.model._meta.sorted_fields if self._also}
        columns |= {} if rows.name is None else {"_named": column(rows.name)}
        columns |= {f"_audit_{name}": value for name, value in rows.audit.items()}
        return CHUNK.format(
            first="candidates" if room else "claimed",
            within=WITHIN if room else "",
            more=_as(measured),
            chosen=self._chosen(only=only, without=without, held_up=held_up),
            limit=limit,
            columns=_as(columns),
            also="".join(f", {name} as ({text}\n        returning 1)" for name, text in self._also.items()),
            recorded=recorded,
            bytes="0" if rows.size is None else "(select coalesce(sum(_size), 0)::bigint from deleted)",
            **parts(rows.total, first=totals_first, behind=list(self._also)),
            **self._names,
        )

    def sizes(self, limit: int, *, without: bool, held_up: bool) -> str:
        """Return the statement that says how large the next rows are."""
        size = self.rows.size
        return SIZES.format(
            size="0" if size is None else f"greatest(coalesce({column(size)}, 0), 0)::bigint",
            limit=limit,
            chosen=self._chosen(without=without, held_up=held_up),
            **self._names,
        )

    def _chosen(self, *, only: bool = False, without: bool, held_up: bool) -> str:
        of = chosen(self._key, only=[] if only else None, without=[0] if without else ())
        if held_up and self.rows.total is not None:
            of += f" and ({owner(self.rows.total)} <> all(%(owners)s)) is not false"
        return of


def _as(columns: Mapping[str, str]) -> str:
    return "".join(f", {value} as {name}" for name, value in columns.items())


def row_of(rows: Rows[Any]) -> str:
    """Return what identifies the rows of a statement: ctid in an ordinary table, else the key."""
    table = rows.model._meta.table_name
    row = database.execute_sql(ORDINARY, (table,)).fetchone()
    return f'"{table}".ctid' if row and row[0] else column(rows.model._meta.primary_key)
