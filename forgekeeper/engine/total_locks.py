"""Common tables that lock the totals of a chunk's rows and subtract the deleted bytes from them.

The chunks of every child update every row of a `Total`'s table.  Children wait for each other's advisory locks
(``turns``), in one order: without that order ten of them deadlock by the hundred.  A total that any other session has
locked is not waited for, as that may take hours: its rows stay (``held_up``), or the statement fails if it has deleted
them already.  Each table names the count of the one before, so that PostgreSQL cannot put that off.
"""

from __future__ import annotations

from collections.abc import Iterable

from forgekeeper.api.answers import Total
from forgekeeper.platform.database.common_tables import CommonTable
from forgekeeper.platform.database.naming import column_name, quote_name

TOTALS_LOCK_CLASS = 0x6B656570
"""Class of the children's advisory locks: the letters ``keep``."""
CLAIMED_OWNERS = "array(select distinct owner from claimed)"


def write_owner_column(total: Total) -> str:
    """Return the column, in SQL, that names a row's total."""
    return f"{column_name(total.of)}::bigint"


def lock_free_totals(total: Total) -> list[CommonTable]:
    """Return the tables that lock the claimed rows' totals.

    ``held_up`` has the totals that others have locked, which are not locked.
    """
    present = f"select {total.key_sql} as owner from {total.table_sql} where {total.key_sql} = any({CLAIMED_OWNERS})"
    held_up = """
        select owner from present
        where (select count(*) from totals) >= 0 and owner <> all(array(select owner from totals))
    """
    return [
        CommonTable("present", present, is_materialized=True),
        _wait_for_turns(["present"]),
        _lock_totals(total, "skip locked"),
        CommonTable("held_up", held_up, is_materialized=True),
    ]


def lock_all_totals(total: Total, *, after: Iterable[str]) -> list[CommonTable]:
    """Return the tables that lock all totals of the claimed rows, once the tables *after* have ended.

    If another session has locked a total, the statement fails with `LOCK_NOT_AVAILABLE`.
    """
    return [_wait_for_turns(after), _lock_totals(total, "nowait")]


def _wait_for_turns(after: Iterable[str]) -> CommonTable:
    ended = " and ".join(f"(select count(*) from {name}) >= 0" for name in after)
    query = f"""
        select pg_advisory_xact_lock({TOTALS_LOCK_CLASS}, owner)
        from (select distinct hashint8(owner) as owner from claimed order by owner) as owners
        where {ended}
    """
    return CommonTable("turns", query, is_materialized=True)


def _lock_totals(total: Total, if_locked: str) -> CommonTable:
    query = f"""
        select {total.key_sql} as owner from {total.table_sql}
        where (select count(*) from turns) >= 0 and {total.key_sql} = any({CLAIMED_OWNERS})
        order by {total.key_sql}
        for no key update {if_locked}
    """
    return CommonTable("totals", query, is_materialized=True)


def reduce_totals(total: Total) -> CommonTable:
    """Return the common table that subtracts the bytes of the deleted rows from their totals."""
    kept = quote_name(total.kept.column_name)
    query = f"""
        update {total.table_sql} as total set {kept} = total.{kept} - gone.size
        from (select _owner, sum(_summed) as size from deleted group by _owner) as gone
        where total.{total.key_sql} = gone._owner and (select count(*) from totals) >= 0
    """
    return CommonTable("reduced", query)
