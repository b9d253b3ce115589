"""User statuses: an emoji and a message that may clear themselves (batch 48)."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, NamedTuple

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from models.database import Base, database, default

# ``= ANY(ARRAY(...))`` is computed once.  ``IN (SELECT ... LIMIT n)`` is not: under a
# nested loop PostgreSQL repeats the subquery, finds unlocked rows anew each time, and
# deletes them all.  A status that is extended between our snapshot and our lock has a new
# ctid, which this snapshot does not see; the condition outside says so to the reader, and
# would hold for any other key.  By ctid it is a third faster; but only in one table of its
# own is it a key: rows of two partitions have the same, and a view has none (`UserStatus.key`).
DELETE_DUE = """
    delete from user_statuses
    where {key} = any(array(
        select {key} from user_statuses
        where clear_status_at <= %(now)s and (clear_status_at, user_id) > (%(cleared)s, %(user)s)
        order by clear_status_at, user_id
        limit %(limit)s
        for update skip locked
    )) and clear_status_at <= %(now)s
    returning clear_status_at, user_id
"""
ORDINARY = """
    select relkind = 'r' and not relispartition and has_table_privilege(oid, 'select')
        and not exists (select from pg_inherits where inhparent = oid)
    from pg_class where oid = to_regclass('user_statuses')
"""


class Position(NamedTuple):
    """Where a run has got to, in the order of the partial index."""

    cleared: datetime | str
    user: int


START = Position("-infinity", 0)


class UserStatus(Base):
    """What a user says of himself, until *clear_status_at*."""

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
        cls, now: datetime, after: Position, *, limit: int, key: Literal["ctid", "user_id"] = "user_id"
    ) -> tuple[int, Position]:
        """Delete up to *limit* due statuses beyond *after*, oldest first.

        They are told apart by *key*; `key` says which will do.  Returns how many were deleted
        and where to go on; none means that nothing more can be deleted now.  Rows that another
        transaction has locked are passed over, not waited for; so is a row that was changed
        while we looked: a later run sees it as it is then.  A status that its user extends
        before the row is locked survives.
        """
        cursor = database.execute_sql(
            DELETE_DUE.format(key=key), {"now": now, "cleared": after.cleared, "user": after.user, "limit": limit}
        )
        deleted = [Position(*row) for row in cursor.fetchall()]
        return len(deleted), max(deleted, default=after)


UserStatus.add_index(
    pw.SQL(
        "create index user_statuses_clear_status_at on user_statuses (clear_status_at, user_id)"
        " where clear_status_at is not null"
    )
)
