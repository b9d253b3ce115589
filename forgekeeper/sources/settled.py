"""Outcomes of direct uploads, in PostgreSQL: unlike Redis, it never loses recent changes.

*Reaped* uploads were deleted by a run, or a run is about to delete them.  Other rows are completed uploads at locations
whose objects no table names.  A transaction that settles an upload holds the upload's lock until it ends: if a producer
and a run both insert a row, the later transaction sees the earlier row.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.platform.database import Base, database, default_sql
from forgekeeper.platform.database.survey import SurveyedRows

UPLOAD_LOCK_SEED = 0x6B656570
"""Seed of the hash of an upload's entry for its advisory lock: the letters ``keep``."""
LOCK_UPLOAD = "select pg_advisory_xact_lock(hashtextextended(%(location)s || ':' || %(path)s, %(seed)s))"
# The role's default may differ, but the statements that follow must see rows that earlier lock holders committed.
LOCK_FREE_UPLOADS = """
    set transaction isolation level read committed;
    select path from unnest(%(paths)s::text[]) as path
    where pg_try_advisory_xact_lock(hashtextextended(%(location)s || ':' || path, %(seed)s))
"""
SELECT_LOCKED_UPLOADS = """
    select path from unnest(%(paths)s::text[]) as path
    where hashtextextended(%(location)s || ':' || path, %(seed)s) = any(array(
        select (classid::bigint << 32) | objid::bigint from pg_locks where locktype = 'advisory' and objsubid = 1
            and database = (select oid from pg_database where datname = current_database())
    ))
"""
RECORD_REAPED_UPLOADS = """
    insert into settled_uploads (location, path, reaped, run)
    select %(location)s, path, true, %(run)s from unnest(%(paths)s::text[]) as path
    on conflict (location, path) do update set settled_at = excluded.settled_at, run = excluded.run
        where settled_uploads.reaped
"""
SELECT_SETTLED_UPLOADS = """
    select path from settled_uploads
    where location = %(location)s and path = any(%(paths)s::text[]) and coalesce(reaped = %(reaped)s::boolean, true)
"""
SETTLED_BEFORE_HORIZON = "settled_at < %(horizon)s"
"""Condition of the rows that runs delete and previews count."""
DELETE_OLD_UPLOADS = f"""
    delete from settled_uploads where (location, path) in (
        select location, path from settled_uploads where {SETTLED_BEFORE_HORIZON} limit %(limit)s for update skip locked
    )
"""


class NoTransaction(Exception):
    """Ask within the transaction that inserts the row, in READ COMMITTED: an upload is settled when that ends."""


class SettledUpload(Base):
    """An upload that was reaped or completed, and the time."""

    location = pw.TextField()
    path = pw.TextField()
    reaped = pw.BooleanField()
    settled_at = DateTimeTZField(constraints=default_sql("clock_timestamp()"), index=True)
    run = pw.BigIntegerField(null=True)

    class Meta:
        table_name = "settled_uploads"
        primary_key = pw.CompositeKey("location", "path")

    @classmethod
    def lock(cls, location: str, path: str) -> None:
        """Lock the upload until this transaction ends; outside one raise `NoTransaction`."""
        # The producer's transaction has begun earlier, so its isolation can only be checked.
        (isolation,) = database.execute_sql("select current_setting('transaction_isolation')").fetchone()
        if not database.in_transaction() or isolation != "read committed":
            raise NoTransaction(NoTransaction.__doc__)
        database.execute_sql(LOCK_UPLOAD, {"location": location, "path": path, "seed": UPLOAD_LOCK_SEED})

    @classmethod
    def lock_free(cls, location: str, paths: Sequence[str]) -> list[str]:
        """Lock the *paths* that nobody has locked, and return them.

        This has to be the first statement of its transaction.
        """
        return _fetch_paths(LOCK_FREE_UPLOADS, location, paths, seed=UPLOAD_LOCK_SEED)

    @classmethod
    def find_locked(cls, location: str, paths: Sequence[str]) -> set[str]:
        """Return the *paths* that a transaction has locked, without locking any."""
        return set(_fetch_paths(SELECT_LOCKED_UPLOADS, location, paths, seed=UPLOAD_LOCK_SEED))

    @classmethod
    def find_settled(cls, location: str, paths: Sequence[str], *, reaped: bool | None = None) -> set[str]:
        """Return the *paths* that were reaped or completed, as *reaped* says; both if it is None."""
        return set(_fetch_paths(SELECT_SETTLED_UPLOADS, location, paths, reaped=reaped))

    @classmethod
    def record_reaped(cls, location: str, paths: Sequence[str], run: int | None) -> None:
        """Record uploads as reaped, before their objects are deleted; needs their locks."""
        database.execute_sql(RECORD_REAPED_UPLOADS, {"location": location, "paths": list(paths), "run": run})

    @classmethod
    def record_completed(cls, location: str, path: str) -> None:
        """Record a completed upload that no table will name; needs its lock."""
        cls.insert(location=location, path=path, reaped=False).on_conflict_ignore().execute()

    @classmethod
    def delete_reaped(cls, location: str, paths: Sequence[str]) -> int:
        """Delete the rows of reaped uploads whose objects were kept after all; return the number."""
        return int(cls.delete().where(cls.location == location, cls.path.in_(list(paths)), cls.reaped).execute())

    @classmethod
    def select_old(cls, horizon: datetime) -> SurveyedRows:
        """Return the rows that `delete_old` would delete."""
        name = "location || ':' || path"
        return SurveyedRows(
            "settled_uploads", SETTLED_BEFORE_HORIZON, {"horizon": horizon}, due="settled_at", key=name, name="path"
        )

    @classmethod
    def delete_old(cls, horizon: datetime, *, limit: int) -> int:
        """Delete up to *limit* rows that were settled before *horizon*; return the number."""
        return int(database.execute_sql(DELETE_OLD_UPLOADS, {"horizon": horizon, "limit": limit}).rowcount)


def _fetch_paths(statement: str, location: str, paths: Sequence[str], **values: int | None) -> list[str]:
    values_of_all = {"location": location, "paths": list(paths), **values}
    return [path for (path,) in database.execute_sql(statement, values_of_all).fetchall()]
