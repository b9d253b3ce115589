"""The statement by which a chunk of rows goes: claimed, deleted, written into the audit and counted in one step.

``= any(array(...))`` is computed once.  ``in (select ... limit n)`` is not: under a nested loop PostgreSQL repeats the
subquery, finds other unlocked rows each time, and deletes them all.

A row that changes between our snapshot and our lock is locked as it is then; the condition is repeated where rows are
deleted, so that one which is not due any more stays.  Tables are deleted from by place (`Target`), which no two rows
share.  A view has no places: its rows are deleted by key, and if that takes more rows than keys the statement fails.

Statistics may be stale: where few were due when the table was analyzed, PostgreSQL would read all that are due for
each chunk; by a plan that was made while the table was tiny it would read the table.  So the claim takes the index in
its order (`IN_ORDER`), and the repeated condition is of a form that no index answers: the deletion goes by its key.

Every child's chunks touch every row of a `Total`'s table.  Children wait for one another by what a total is kept of, in
one order, on locks that are ours alone (``turns``): without the order ten of them deadlock by the hundred.  A total
that anyone else has locked by then is not waited for: that may take hours.  ``totals`` locks what it gets; what is
``present`` and was not got is ``held_up``, and its rows stay for now.  Each part names the count of the one before, so
that PostgreSQL cannot put that off.

What comes after the turns is done by one child at a time.  So they come last: two processes delete 1.75 times as much
as one, and with the totals first 0.97 times (`python -m benchmarks artifacts_two`).  Should others have a total locked
then, it is too late to leave its rows: the statement fails, and is repeated with the totals first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import peewee as pw

from forgekeeper.audit.deletions import OTHER
from forgekeeper.database import Base
from forgekeeper.database.cascades import Cascades
from forgekeeper.database.naming import column_name, quote_name, relation_name, write_expression
from forgekeeper.database.relations import find_other_columns
from forgekeeper.database.targets import Target
from forgekeeper.declaring.answers import Rows, Total
from forgekeeper.runs.preconditions import Blocked

CHUNK = """
    with {recursive}{first} as materialized (
        select {row} as row, {since} as since, {key} as key{more} from {table}
        where {due} and ({since}, {key}) > (%(instant)s, %(key)s::bigint){chosen}
        order by {since}, {key}
        limit {limit}
        for update skip locked
    ){cascaded}{within}{locked_first}, deleted as (
        delete from {table}
        where {row} = any(array(select row from claimed{free})){in_table}{pruned} and ({due}) is true
        returning {since} as _since, {key} as _key{columns}
    ), reached as (
        select _since as since, _key as key from deleted
        union all
        select since, key from claimed where not exists (select from deleted)
    ){also}{carried}{recorded}{locked_last}
    select {count}, {bytes}, since::text, key, {held_up}, {keys}, {followers}, {so_far},
        (select count(*) from claimed)
    from reached
    order by reached.since desc, reached.key desc limit 1
"""
# Where bytes are limited, of what was claimed the first that keep within what is left.
WITHIN = """, claimed as materialized (
        select * from (
            select *, sum(size) over (order by since, key) as total from candidates
        ) as added_up where total <= %(room)s::bigint
    )"""
# The same where other rows follow, by how many each takes with it.  A row that follows two counts for each of them.
WITHIN_WEIGHT = """, claimed as materialized (
        select * from (
            select candidates.*, {total}sum(weight) over (order by since, key) as weights
            from candidates join (select root, count(*) as weight from cascaded group by root) as weighed on root = key
        ) as added_up where {within}weights <= %(rows_room)s::bigint
    )"""
TOTAL_SIZE, WITHIN_SIZE = "sum(size) over (order by since, key) as total, ", "total <= %(room)s::bigint and "
# The rows that PostgreSQL deletes or changes together with those that were deleted, each once.
CARRIED = """, carried as materialized (
        select node, row, min(root) as root from cascaded
        where root = any(array(select _key from deleted)) and (node, row) not in (select 0, _own from deleted)
        group by node, row
    ), touched as (
        select {size} as _size from deleted union all select 0 from carried
    ){each}"""
SO_FAR = "(select coalesce(sum(pg_stat_get_xact_tuples_deleted(oid)), 0)::bigint from unnest({}::oid[]) as oid)"
"""Rows that this session has deleted from tables, since PostgreSQL has last added its figures to those of others."""
# An error with a code of its own, and no commit, if foreign keys have deleted more than was counted.
INSIST = f"select 1 / case when {SO_FAR.format('%(tables)s')} > %(at_most)s then 0 else 1 end; "
UNCOUNTED = "22012"
"""How the commit fails then."""
OF_PLACE = ", carried_{place} as (select row, root from carried where node = {place})"
# What could be claimed next, as far as it is not locked; nothing stays locked.
SIZES = """
    select {key}, {size}, 1 from {table}
    where {due} and ({since}, {key}) > (%(instant)s, %(key)s::bigint){chosen}
    order by {since}, {key}
    limit {limit}
    for update skip locked
"""
WEIGHTS = """
    with recursive candidates as materialized (
        select {key} as key, {since} as since, {size} as size, {own} as own from {table}
        where {due} and ({since}, {key}) > (%(instant)s, %(key)s::bigint){chosen}
        order by {since}, {key}
        limit {limit}
        for update skip locked
    ){cascaded}
    select key, size, weight
    from candidates join (select root, count(*) as weight from cascaded group by root) as weighed on root = key
    order by since, key
"""
# Rows that are locked stay in their partition.  By an array of values PostgreSQL leaves no partition out; by bounds it
# does, and what becomes due one after another lies side by side.
PRUNED = " and {part} between (select min(part) from claimed) and (select max(part) from claimed)"
# Compared with "is true" the subquery is not turned into a join: PostgreSQL hashes it once.
IN_TABLE = " and (({tableoid}, {ctid}) in (select place, row from claimed{free})) is true"
COUNT_ROWS = "(select count(*) from deleted)"
# A text that is no date is an error with a code of its own.
COUNT_OF_KEYS = """(
            select case when count(*) > count(distinct _key)
                then extract(epoch from (count(*) || ' rows of ' || count(distinct _key) || ' keys')::date)::bigint
                else count(*) end
            from deleted
        )"""
NOT_UNIQUE = "22007"
"""How a statement fails that would delete more rows of a view than it has claimed keys."""
TURNS = 0x6B656570
"""The advisory locks by which our children wait for one another: the letters ``keep``."""
LOCKED = """, present as materialized (
        select {key} as owner from {table} where {key} = any(array(select distinct owner from claimed))
    ), turns as materialized (
        select pg_advisory_xact_lock({turns}, owner)
        from (select distinct hashint8(owner) as owner from claimed order by owner) as owners
        where (select count(*) from present) >= 0{after}
    ), totals as materialized (
        select {key} as owner from {table}
        where (select count(*) from turns) >= 0 and {key} = any(array(select distinct owner from claimed))
        order by {key}
        for no key update skip locked
    ), held_up as materialized (
        select owner from present
        where (select count(*) from totals) >= 0 and owner <> all(array(select owner from totals))
    )"""
REDUCED = """, reduced as (
        update {table} as total set {kept} = total.{kept} - gone.size
        from (select _owner, sum(_summed) as size from deleted group by _owner) as gone
        where total.{key} = gone._owner
    )"""
FREE = " where (owner <> all(array(select owner from held_up))) is not false"
HELD_UP = "array(select owner from held_up)"
# A text that is no array is an error, and one that says to anyone who reads the server's log what happened.
NONE_HELD_UP = """case when exists (select from held_up)
            then (select 'total locked by others, first of ' || min(owner) from held_up)::bigint[]
            else array[]::bigint[] end"""
NO_ARRAY = "22P02"
"""How a statement fails that comes to a locked total too late."""
PLACE = re.compile(r"%s|%%")
"""Where a value of peewee's goes."""


def condition(model: type[Base], expression: pw.Node) -> tuple[str, dict[str, Any]]:
    """Return *expression* over the model's columns in SQL, with its values by name: all runs prepare one statement."""
    return named(*write_expression(model, expression), name="due")


def named(text: str, values: Sequence[Any], *, name: str) -> tuple[str, dict[str, Any]]:
    """Return SQL with its values called *name* and a number, and these."""
    numbers = iter(range(len(values)))

    def call(found: re.Match[str]) -> str:
        return found[0] if found[0] == "%%" else f"%({name}_{next(numbers)})s"

    return PLACE.sub(call, text), {f"{name}_{number}": value for number, value in enumerate(values)}


class Composed:
    """The statements of the rows that a run deletes, and the *values* that they name.

    *audit* has the expressions of what the audit keeps of each row, by its names.

    Raises `Blocked` if PostgreSQL would delete or change rows with them that the answer does not name.
    """

    def __init__(self, rows: Rows[Any]) -> None:
        self.rows = rows
        self.target = Target.find(rows.model)
        self.cascades = Cascades.find(self.target, rows.cascades_to)
        if self.cascades.refused:
            raise Blocked("schema", self.cascades.refused[0])
        due, self.values = condition(rows.model, rows.due)
        self._also = dict[str, str]()
        for number, each in enumerate(rows.also):
            name = f"also_{number}"
            self._also[name], values = named(each.sql, each.params or (), name=name)
            self.values |= values
        self.values |= {"tables": list(self.cascades.deleted)} if self.follows else {}
        others = find_other_columns(rows.model) if rows.restorable else ()
        self.audit = dict(rows.audit) | {f"{OTHER}{name}": _as_json(name) for name in others}
        self._key = column_name(rows.model._meta.primary_key)
        partition = None if self.target.by_ctid else rows.model.partition
        self._part = column_name(getattr(rows.model, partition)) if partition else None
        self._names = {
            "since": column_name(rows.since),
            "key": self._key,
            "table": relation_name(rows.model),
            "due": due,
            "row": row_of(self.target),
        }

    def text(
        self,
        limit: int,
        *,
        recorded: str = "",
        only: bool = False,
        without: bool = False,
        room: bool = False,
        rows_room: bool = False,
        held_up: bool = False,
        totals_first: bool = False,
    ) -> str:
        """Return the statement of a chunk of *limit* rows; *recorded* are the parts that write the audit and count.

        *only* says that keys are named, *without* that some are left out, *room* that bytes are limited, *rows_room*
        that rows are, those included which follow others.  *held_up* says that totals are known to be locked.
        """
        rows, target = self.rows, self.target
        measured = {} if rows.size is None else {"size": limited(rows.size)}
        measured |= {} if rows.total is None else {"owner": owner(rows.total)}
        claimed = measured | ({} if self._part is None else {"part": self._part})
        in_table = IN_TABLE if target.has_places and not target.is_single else ""
        claimed |= {"place": target.tableoid} if in_table else {}
        first = "candidates" if room or (rows_room and self.follows) else "claimed"
        columns = {f"_{name}": value for name, value in measured.items()}
        columns |= {} if rows.total is None or rows.size is None else {"_summed": summed(rows.size)}
        columns |= {f'"{one.column_name}"': column_name(one) for one in rows.model._meta.sorted_fields if self._also}
        columns |= {} if rows.name is None else {"_named": column_name(rows.name)}
        columns |= {f"_audit_{place}": value for place, value in enumerate(self.audit.values())}
        if self.follows:
            claimed |= {"own": self.cascades.own}
            columns |= {"_own": self.cascades.own}
        totals = parts(rows.total, first=totals_first, behind=list(self._also))
        return CHUNK.format(
            first=first,
            within=self._within(room=room, rows_room=rows_room),
            more=_as(claimed),
            in_table=in_table.format(tableoid=target.tableoid, ctid=target.ctid, **totals),
            pruned=PRUNED.format(part=self._part) if self._part else "",
            chosen=self._chosen(only=only, without=without, held_up=held_up),
            limit=limit,
            columns=_as(columns),
            also="".join(f", {name} as ({text}\n        returning 1)" for name, text in self._also.items()),
            recorded=recorded,
            count=COUNT_ROWS if target.has_places else COUNT_OF_KEYS,
            keys="array(select _key from deleted)" if target.instead else "null",
            bytes="0" if rows.size is None else "(select coalesce(sum(_size), 0)::bigint from deleted)",
            **self._following(first),
            **totals,
            **self._names,
        )

    def sizes(self, limit: int, *, without: bool, held_up: bool) -> str:
        """Return the statement that has the keys of the next rows, their sizes, and how many rows each deletes."""
        values = {
            "size": "0" if self.rows.size is None else limited(self.rows.size),
            "limit": limit,
            "chosen": self._chosen(without=without, held_up=held_up),
            **self._names,
        }
        if not self.follows:
            return SIZES.format(**values)
        return WEIGHTS.format(own=self.cascades.own, cascaded=self.cascades.text("candidates"), **values)

    @property
    def follows(self) -> bool:
        """Whether rows that are counted follow the deleted ones."""
        return bool(self.cascades.links)

    def _within(self, *, room: bool, rows_room: bool) -> str:
        if rows_room and self.follows:
            sizes = {"total": TOTAL_SIZE, "within": WITHIN_SIZE} if room else {"total": "", "within": ""}
            return WITHIN_WEIGHT.format(**sizes)
        return WITHIN if room else ""

    def _following(self, first: str) -> dict[str, str]:
        """Return the parts of the statement about rows that follow those of its part *first*."""
        if not self.follows:
            return {"recursive": "", "cascaded": "", "carried": "", "followers": "null", "so_far": "null"}
        each = "".join(OF_PLACE.format(place=place) for place in self.cascades.followers)
        counts = "select node, count(*) as count from carried group by node"
        return {
            "recursive": "recursive ",
            "cascaded": self.cascades.text(first),
            "carried": CARRIED.format(size="0" if self.rows.size is None else "_size", each=each),
            # The last to be computed: foreign keys delete after the statement.
            "so_far": SO_FAR.format("%(tables)s"),
            "followers": f"(select array_agg(array[node, count]) from ({counts}) as counts)",
        }

    def _chosen(self, *, only: bool = False, without: bool, held_up: bool) -> str:
        of = f" and {self._key} = any(%(only)s)" if only else ""
        of += f" and {self._key} <> all(%(without)s)" if without else ""
        if held_up and self.rows.total is not None:
            of += f" and ({owner(self.rows.total)} <> all(%(owners)s)) is not false"
        return of


def row_of(target: Target) -> str:
    """Return how the deletion finds a row, in SQL: by its ctid in a table, by its key in a view."""
    (key,) = target.model._meta.get_primary_keys()
    return target.ctid if target.has_places else column_name(key)


def _as_json(name: str) -> str:
    """Return the value of a column of any type in SQL, as JSON in a text: an array would be one value for each row."""
    return f"coalesce(to_jsonb({quote_name(name)})::text, 'null')".replace("%", "%%")


def _as(columns: Mapping[str, str]) -> str:
    return "".join(f", {value} as {name}" for name, value in columns.items())


def limited(size: pw.Field[Any]) -> str:
    """Return a row's bytes for limits, results and previews, in SQL: a negative size is 0, it gives no bytes back."""
    return f"greatest({summed(size)}, 0)::bigint"


def summed(size: pw.Field[Any]) -> str:
    """Return a row's bytes for a `Total`, in SQL: its size as it is, since the forge has added it as it is."""
    return f"coalesce({column_name(size)}, 0)"


def owner(total: Total) -> str:
    """Return what a row's total is kept of, in SQL."""
    return f"{column_name(total.of)}::bigint"


def parts(total: Total | None, *, first: bool, behind: Sequence[str]) -> dict[str, str]:
    """Return the parts of a chunk's statement that lock the totals and take the bytes off.

    They are locked *first*, or *behind* the parts of those names, which write; ``held_up`` says which others have.
    """
    if total is None:
        return {"locked_first": "", "free": "", "locked_last": "", "held_up": "array[]::bigint[]"}
    names = {"table": total.table, "key": total.key, "kept": quote_name(total.kept.column_name)}
    reduced = REDUCED.format(**names)
    if first:
        locked = LOCKED.format(turns=TURNS, after="", **names)
        return {"locked_first": locked, "free": FREE, "locked_last": reduced, "held_up": HELD_UP}
    after = "".join(f" and (select count(*) from {one}) >= 0" for one in behind)
    locked = LOCKED.format(turns=TURNS, after=after, **names)
    return {"locked_first": "", "free": "", "locked_last": locked + reduced, "held_up": NONE_HELD_UP}
