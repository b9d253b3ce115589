"""Quarantine: what failed, from its first failure until it ends well.  For now that is children.

It lies in PostgreSQL, so that a Redis that was emptied, or that does not answer, hides no failure.  When a child is
tried again is the delivery's affair: its message says so.
"""

from __future__ import annotations

from datetime import datetime

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.database import Base, database, default
from forgekeeper.database.grants import WORK, WRITES, Use

CHILD_FAILED = "child_failed"
FAIL = """
    insert into quarantine as known (batch, record, key, reason, error, since, failed_at, run)
    select %(batch)s, %(record)s, %(key)s, %(reason)s, %(error)s, at, at, %(run)s from clock_timestamp() as at
    on conflict (batch, record, key) do update set
        failures = known.failures + 1, reason = excluded.reason, error = excluded.error,
        failed_at = excluded.failed_at, run = excluded.run
"""


def fail(batch: str, record: str, key: str, error: str, *, reason: str, run: int | None = None) -> None:
    Quarantined.fail(batch, record, key, error, run=run, reason=reason)


class Quarantined(Base):
    """A child that failed: *record* is its declaration's name, *key* its message's id, *run* the one that sent it."""

    used_by = Use(WORK, WRITES)

    batch = pw.TextField()
    record = pw.TextField()
    key = pw.TextField()
    reason = pw.TextField()
    error = pw.TextField()
    failures = pw.IntegerField(constraints=default("1"))
    since = DateTimeTZField()
    failed_at = DateTimeTZField()
    run = pw.BigIntegerField(null=True)

    class Meta:
        table_name = "quarantine"
        primary_key = pw.CompositeKey("batch", "record", "key")

    @classmethod
    def fail(
        cls, batch: str, record: str, key: str, error: str, *, run: int | None, reason: str = CHILD_FAILED
    ) -> None:
        """Note a failure of a child; the first one begins its stay."""
        values = {"batch": batch, "record": record, "key": _text(key), "reason": reason}
        database.execute_sql(FAIL, values | {"error": _text(error), "run": run})

    @classmethod
    def end(cls, batch: str, record: str, key: str) -> None:
        """Forget a child that ended well, or that a person has given up."""
        child = (cls.batch == batch) & (cls.record == record) & (cls.key == _text(key))
        # Most have never failed: then a child only looks, and does not lock the table for writing.
        if cls.select().where(child).exists():
            cls.delete().where(child).execute()

    @classmethod
    def waiting(cls, batch: str, record: str, keys: object) -> set[str]:
        return set()

    @classmethod
    def of(cls, batch: str, *, run: int | None = None) -> pw.ModelSelect[Quarantined]:
        """Select the batch's, or those that one *run* has sent; the one that failed last first."""
        which = [cls.batch == batch] if run is None else [cls.batch == batch, cls.run == run]
        return cls.select().where(*which).order_by(cls.failed_at.desc(), cls.record, cls.key)

    @classmethod
    def forget_old(cls, horizon: datetime) -> int:
        """Forget what has not failed since *horizon*; return how many there were."""
        return int(cls.delete().where(cls.failed_at < horizon).execute())


def _text(value: str) -> str:
    """Return what PostgreSQL can keep: no NUL, no half of a character."""
    return value.replace("\0", "\\x00").encode(errors="backslashreplace").decode()
