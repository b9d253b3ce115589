"""What has become of direct uploads, remembered beside Redis: the register may go back, this does not.

Reaped is what a sweep has deleted or is about to delete; what is not has completed at a location
whose objects no table names.  Whoever settles an upload holds its lock until the transaction ends,
so that of a producer's row and a sweep's memory the later one sees the earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.database import Base, database, default
from forgekeeper.database.survey import Rows

LOCKS = 0x6B656570
"""The seed by which an upload's entry is hashed for its advisory lock: the letters ``keep``."""

LOCK = "select pg_advisory_xact_lock(hashtextextended(%(location)s || ':' || %(path)s, %(seed)s))"
# Whatever the role's default is: what the one before us has committed must be seen by the statements that follow.
LOCK_FREE = """
    set transaction isolation level read committed;
    select path from unnest(%(paths)s::text[]) as path
    where pg_try_advisory_xact_lock(hashtextextended(%(location)s || ':' || path, %(seed)s))
"""
# A producer's transaction has begun before.
ISOLATION = "select current_setting('transaction_isolation')"
# Whoever settles an upload holds its lock; asking for it would keep others from it.
BEING_SETTLED = """
    select path from unnest(%(paths)s::text[]) as path
    where hashtextextended(%(location)s || ':' || path, %(seed)s) = any(array(
        select (classid::bigint << 32) | objid::bigint from pg_locks where locktype = 'advisory' and objsubid = 1
            and database = (select oid from pg_database where datname = current_database())
    ))
"""
REAP = """
    insert into settled_uploads (location, path, reaped, run)
    select %(location)s, path, true, %(run)s from unnest(%(paths)s::text[]) as path
    on conflict (location, path) do update set settled_at = excluded.settled_at, run = excluded.run
        where settled_uploads.reaped
"""
# The paths as one value: as a list of many they took longer to be put together than to be looked for.
NAMED = """
    select path from settled_uploads
    where location = %(location)s and path = any(%(paths)s::text[]) and coalesce(reaped = %(reaped)s::boolean, true)
"""
COMPLETE = """
    insert into settled_uploads (location, path, reaped) values (%(location)s, %(path)s, false)
    on conflict (location, path) do nothing
"""
OLD = "settled_at < %(horizon)s"
"""What is removed; what `run --dry-run` counts, too."""
DELETE_OLD = f"""
    delete from settled_uploads where (location, path) in (
        select location, path from settled_uploads where {OLD} limit %(limit)s
        for update skip locked
    )
"""


class NoTransaction(Exception):
    """Ask within the transaction that inserts the row, in READ COMMITTED: an upload is settled when that ends."""


class SettledUpload(Base):
    """An upload that was reaped, or has completed, and when."""

    location = pw.TextField()
    path = pw.TextField()
    reaped = pw.BooleanField()
    settled_at = DateTimeTZField(constraints=default("clock_timestamp()"), index=True)
    run = pw.BigIntegerField(null=True)

    class Meta:
        table_name = "settled_uploads"
        primary_key = pw.CompositeKey("location", "path")

    @classmethod
    def lock(cls, location: str, path: str) -> None:
        """Let nobody settle the upload until this transaction ends; raise `NoTransaction` where that is none."""
        isolation = database.execute_sql(ISOLATION).fetchone()[0]
        if not database.in_transaction() or isolation != "read committed":
            raise NoTransaction(NoTransaction.__doc__)
        database.execute_sql(LOCK, {"location": location, "path": path, "seed": LOCKS})

    @classmethod
    def lock_free(cls, location: str, paths: Sequence[str]) -> list[str]:
        """Lock those that no other transaction is settling, until this one ends, and return them.

        The first that is asked in a transaction.
        """
        values = {"location": location, "paths": list(paths), "seed": LOCKS}
        return [path for (path,) in database.execute_sql(LOCK_FREE, values).fetchall()]

    @classmethod
    def being_settled(cls, location: str, paths: Sequence[str]) -> set[str]:
        """Return those that another transaction is settling; none is locked."""
        values = {"location": location, "paths": list(paths), "seed": LOCKS}
        return {path for (path,) in database.execute_sql(BEING_SETTLED, values).fetchall()}

    @classmethod
    def named(cls, location: str, paths: Sequence[str], *, reaped: bool | None = None) -> set[str]:
        """Return those of *paths* that were settled: reaped, completed, or either if it does not matter."""
        values = {"location": location, "paths": list(paths), "reaped": reaped}
        return {path for (path,) in database.execute_sql(NAMED, values).fetchall()}

    @classmethod
    def reap(cls, location: str, paths: Sequence[str], run: int | None) -> None:
        """Remember, before their objects go, that the uploads were reaped; needs their locks."""
        database.execute_sql(REAP, {"location": location, "paths": list(paths), "run": run})

    @classmethod
    def complete(cls, location: str, path: str) -> None:
        """Remember that an upload has completed which no table will name; needs its lock."""
        database.execute_sql(COMPLETE, {"location": location, "path": path})

    @classmethod
    def forget(cls, location: str, paths: Sequence[str]) -> int:
        """Remember no more of uploads whose objects stay after all; return how many there were."""
        if not paths:
            return 0
        return int(cls.delete().where(cls.location == location, cls.path.in_(list(paths)), cls.reaped).execute())

    @classmethod
    def old(cls, horizon: datetime) -> Rows:
        """Say what `delete_old` would remember no more."""
        name = "location || ':' || path"
        return Rows("settled_uploads", OLD, {"horizon": horizon}, due="settled_at", key=name, name="path")

    @classmethod
    def delete_old(cls, horizon: datetime, *, limit: int) -> int:
        """Remember no more of up to *limit* uploads that were settled before *horizon*; return how many."""
        count: int = database.execute_sql(DELETE_OLD, {"horizon": horizon, "limit": limit}).rowcount
        return count
