"""Common tables that lock the totals of a chunk's rows and subtract the deleted bytes from them.

The chunks of every child update every row of a `Total`'s table.  Children wait for each other's advisory locks
(``turns``), in one order: without that order ten of them deadlock by the hundred.  A total that any other session has
locked is not waited for, as that may take hours: ``totals`` has the totals that it could lock, ``held_up`` the owners
of the others.  Each table names the count of the one before, so that PostgreSQL cannot put that off.
"""

from __future__ import annotations

from collections.abc import Iterable

from forgekeeper.database.common_tables import CommonTable
from forgekeeper.database.naming import column_name, quote_name
from forgekeeper.declaring.answers import Total

TURNS = 0x6B656570
"""Class of the children's advisory locks: the letters ``keep``."""
OWNERS = "array(select distinct owner from claimed)"
NONE_HELD_UP = """case when exists (select from held_up)
            then (select 'total locked by others, first of ' || min(owner) from held_up)::bigint[]
            else array[]::bigint[] end"""
NO_ARRAY = "22P02"


def owner_of(total: Total) -> str:
    """Return the column by which a row finds its total, in SQL."""
    return f"{column_name(total.of)}::bigint"


def lock_totals(total: Total, *, after: Iterable[str] = ()) -> list[CommonTable]:
    """Return the common tables that lock the totals of the claimed rows, once the tables *after* have ended."""
    return [_find_totals(total), _wait_for_turns(["present", *after]), _lock_free_totals(total), _find_held_up()]


def _find_totals(total: Total) -> CommonTable:
    query = f"select {total.key} as owner from {total.table} where {total.key} = any({OWNERS})"
    return CommonTable("present", query, is_materialized=True)


def _wait_for_turns(after: Iterable[str]) -> CommonTable:
    ended = " and ".join(f"(select count(*) from {name}) >= 0" for name in after)
    query = f"""
        select pg_advisory_xact_lock({TURNS}, owner)
        from (select distinct hashint8(owner) as owner from claimed order by owner) as owners
        where {ended}
    """
    return CommonTable("turns", query, is_materialized=True)


def _lock_free_totals(total: Total) -> CommonTable:
    query = f"""
        select {total.key} as owner from {total.table}
        where (select count(*) from turns) >= 0 and {total.key} = any({OWNERS})
        order by {total.key}
        for no key update skip locked
    """
    return CommonTable("totals", query, is_materialized=True)


def _find_held_up() -> CommonTable:
    query = """
        select owner from present
        where (select count(*) from totals) >= 0 and owner <> all(array(select owner from totals))
    """
    return CommonTable("held_up", query, is_materialized=True)


def reduce_totals(total: Total) -> CommonTable:
    """Return the common table that subtracts the bytes of the deleted rows from their totals."""
    kept = quote_name(total.kept.column_name)
    query = f"""
        update {total.table} as total set {kept} = total.{kept} - gone.size
        from (select _owner, sum(_summed) as size from deleted group by _owner) as gone
        where total.{total.key} = gone._owner
    """
    return CommonTable("reduced", query)
