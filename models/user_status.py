"""User statuses: an emoji and a message that may clear themselves (batch 48)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Literal, NamedTuple

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.database import LOWEST, Base, chosen, database, default
from forgekeeper.database.use import SEEN, WORK, Use

# ``= ANY(ARRAY(...))`` is computed once.  ``IN (SELECT ... LIMIT n)`` is not: under a
# nested loop PostgreSQL repeats the subquery, finds unlocked rows anew each time, and
# deletes them all.  A status that is extended between our snapshot and our lock has a new
# ctid, which this snapshot does not see; the condition outside says so to the reader, and
# would hold for any other key.  By ctid it is a third faster; but only in one table of its
# own is it a key: rows of two partitions have the same, and a view has none (`UserStatus.key`).
CLAIM_DUE = """
        select {key} as key, clear_status_at, user_id from user_statuses
        where clear_status_at <= %(now)s and (clear_status_at, user_id) > (%(cleared)s, %(user)s){chosen}
        order by clear_status_at, user_id
        limit %(limit)s"""
DELETE_DUE = f"""
    with claimed as materialized ({CLAIM_DUE}
        for update skip locked
    ), deleted as (
        delete from user_statuses
        where {{key}} = any(array(select key from claimed)) and clear_status_at <= %(now)s
        returning clear_status_at, user_id
    ), reached as (
        select clear_status_at, user_id from deleted
        union all
        select clear_status_at, user_id from claimed where not exists (select from deleted)
    )
    select (select count(*) from deleted), clear_status_at::text, user_id
    from reached order by reached.clear_status_at desc, user_id desc limit 1
"""
DUE = f"select clear_status_at::text, user_id from ({CLAIM_DUE}) as due order by due.clear_status_at, user_id"
ORDINARY = """
    select relkind = 'r' and not relispartition and has_table_privilege(oid, 'select')
        and not exists (select from pg_inherits where inhparent = oid)
    from pg_class where oid = to_regclass('user_statuses')
"""


class Position(NamedTuple):
    """Where a run has got to, in the order of the partial index; the time as PostgreSQL writes it."""

    cleared: str
    user: int


START = Position("-infinity", LOWEST)


class UserStatus(Base):
    """What a user says of himself, until *clear_status_at*."""

    found_by = ("user_id",)
    used_by = Use(SEEN, (("update", ("user_id",), WORK), ("delete", (), WORK)))

    user_id = pw.BigIntegerField(primary_key=True)
    emoji = pw.TextField(constraints=default("'speech_balloon'"))
    message = pw.CharField(max_length=100, null=True)
    message_html = pw.TextField(null=True)
    availability = pw.SmallIntegerField(constraints=default("0"))
    clear_status_at = DateTimeTZField(null=True)

    class Meta:
        table_name = "user_statuses"

    @classmethod
    def due(cls, now: datetime) -> pw.ModelSelect[UserStatus]:
        """Select the statuses whose time has come, *now* included."""
        return cls.select().where(cls.clear_status_at <= now)

    @classmethod
    def key(cls) -> Literal["ctid", "user_id"]:
        """Return what tells the rows apart: by ctid it is faster, where the table is proved to be an ordinary one."""
        row = database.execute_sql(ORDINARY).fetchone()
        return "ctid" if row and row[0] else "user_id"

    @classmethod
    def delete_due(
        cls,
        now: datetime,
        after: Position,
        *,
        limit: int,
        key: Literal["ctid", "user_id"] = "user_id",
        only: Sequence[int] | None = None,
        without: Collection[int] = (),
    ) -> tuple[int, Position | None]:
        """Delete up to *limit* due statuses beyond *after*, oldest first; of *only* these users, *without* those.

        They are told apart by *key*; `key` says which will do.
        Returns how many were deleted and where to go on, None if nothing more can be
        deleted now.  Rows that another transaction has locked are passed over, not waited
        for; so is a row that was changed while we looked: a later run sees it as it is
        then.  A status that its user extends before the row is locked survives.
        """
        values = {"now": now, "limit": limit, "only": only, "without": list(without), **after._asdict()}
        statement = DELETE_DUE.format(key=key, chosen=chosen("user_id", only=only, without=without))
        row = database.execute_sql(statement, values).fetchone()
        return (row[0], Position(*row[1:])) if row else (0, None)

    @classmethod
    def next_due(cls, now: datetime, after: Position, *, limit: int, without: Collection[int] = ()) -> list[Position]:
        """Return the places of what `delete_due` would take, locked or not."""
        values = {"now": now, "limit": limit, "without": list(without), **after._asdict()}
        rows = database.execute_sql(
            DUE.format(key="user_id", chosen=chosen("user_id", without=without)), values
        ).fetchall()
        return [Position(*row) for row in rows]

    @classmethod
    def still_due(cls, now: datetime, users: Sequence[int]) -> set[int]:
        """Return those of *users* whose status is due."""
        return {row.user_id for row in cls.due(now).select(cls.user_id).where(cls.user_id.in_(list(users)))}


UserStatus.add_index(
    pw.SQL(
        "create index user_statuses_clear_status_at on user_statuses (clear_status_at, user_id)"
        " where clear_status_at is not null"
    )
)
