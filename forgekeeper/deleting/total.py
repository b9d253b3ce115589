"""How a chunk takes its bytes off a total: the parts of its statement, and the totals that others have locked.

Every child's chunks touch every row of the totals' table.  Children wait for one another by what a total is kept of, in
one order, on locks that are ours alone (``turns``): without the order ten of them deadlock by the hundred.  A total
that anyone else has locked by then is not waited for: that may take hours, and every child would stand still.
``totals`` locks what it gets; what is ``present`` and was not got is ``held_up``, and its rows stay for now.  What has
no total is not held up.  Each part names the count of the one before, so that PostgreSQL cannot put that off.

What comes after the turns is done by one child at a time.  So they come last, with little but the commit after them:
two processes delete 1.75 times as much as one, and with the totals first 0.97 times (`python -m benchmarks
artifacts_two`).  Should others have a total locked then, it is too late to leave its rows: the statement fails, and is
repeated with the totals first.
"""

from __future__ import annotations

from collections.abc import Sequence

from forgekeeper.declaring.rows import Total
from forgekeeper.deleting.sql import column

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
        from (select _owner, sum(_size) as size from deleted group by _owner) as gone
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


def owner(total: Total) -> str:
    """Return what a row's total is kept of, in SQL."""
    return f"{column(total.of)}::bigint"


def parts(total: Total | None, *, first: bool, behind: Sequence[str]) -> dict[str, str]:
    """Return the parts of a chunk's statement that lock the totals and take the bytes off.

    They are locked *first*, or *behind* the parts of those names, which write; ``held_up`` says which others have.
    """
    if total is None:
        return {"locked_first": "", "free": "", "locked_last": "", "held_up": "array[]::bigint[]"}
    names = {"table": total.table, "key": total.key, "kept": total.kept.column_name}
    reduced = REDUCED.format(**names)
    if first:
        locked = LOCKED.format(turns=TURNS, after="", **names)
        return {"locked_first": locked, "free": FREE, "locked_last": reduced, "held_up": HELD_UP}
    after = "".join(f" and (select count(*) from {one}) >= 0" for one in behind)
    locked = LOCKED.format(turns=TURNS, after=after, **names)
    return {"locked_first": "", "free": "", "locked_last": locked + reduced, "held_up": NONE_HELD_UP}
