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

import peewee as pw
import structlog

from forgekeeper.database import database, sqlstate
from forgekeeper.database.writes import write_first
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
LOCK = "select {key} from {table} where {key} = any(%(owners)s) for no key update"
LOCK_NOT_AVAILABLE = "55P03"

log = structlog.get_logger(__name__)


def owner(total: Total) -> str:
    """Return what a row's total is kept of, in SQL."""
    return f"{column(total.of)}::bigint"


def locked(total: Total, *, after: str) -> str:
    """Return the parts of a statement that lock the totals of what is claimed, *after* a condition."""
    return LOCKED.format(turns=TURNS, after=after, **_names(total))


def reduced(total: Total) -> str:
    """Return the part that takes the bytes off."""
    return REDUCED.format(**_names(total))


class HeldUp:
    """The rows of a total that somebody else has locked: they stop nobody, and are not looked at again and again.

    Most are locked for a moment: the rows are gone through again for those that have become free.  The others wait for
    a later run.
    """

    def __init__(self, total: Total | None) -> None:
        self.now: set[int] = set()
        self._left: set[int] = set()
        self._total = total

    @property
    def owners(self) -> set[int]:
        """Those whose rows are to be left out."""
        return self.now | self._left

    def became_free(self) -> bool:
        """Wait a little for those that are locked now; say whether one of them is free."""
        if not self.now or self._total is None:
            return False
        left = _wait_for(self._total, self.now)
        if left:
            log.warning("totals locked", table=_names(self._total)["table"], totals=len(left), first=min(left))
        free, self.now = self.now - left, set()
        self._left |= left
        return bool(free)


def _wait_for(total: Total, owners: set[int]) -> set[int]:
    """Wait until nobody has the totals of *owners* locked; return those that stay locked.

    Nothing is held meanwhile.  The first that is not freed in time ends the waiting: it may be one of thousands that
    one session has locked.
    """
    left, lock = sorted(owners), write_first() + LOCK.format(**_names(total))
    try:
        while left:
            database.execute_sql(lock, {"owners": left[:1]})
            del left[0]
    except pw.OperationalError as error:
        if sqlstate(error) != LOCK_NOT_AVAILABLE:
            raise
    free = database.execute_sql(f"{lock} skip locked", {"owners": left}).fetchall()
    return set(left).difference(owner for (owner,) in free)


def _names(total: Total) -> dict[str, str]:
    meta = total.kept.model._meta
    return {"table": f'"{meta.table_name}"', "key": f'"{meta.primary_key.column_name}"', "kept": total.kept.column_name}
