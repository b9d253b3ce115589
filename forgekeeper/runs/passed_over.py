"""Bad records: what could not be worked on alone, and when it is tried again."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import NamedTuple

import peewee as pw
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.database import Base, database, default
from forgekeeper.database.grants import SEEN, WRITES, Use
from forgekeeper.database.writes import writing

FIRST_PAUSE = timedelta(minutes=5)
LONGEST_PAUSE = timedelta(days=1)

KNOWN = """
    select key, retry_at > clock_timestamp() from passed_over_records
    where batch = %(batch)s and record = %(record)s
"""
# What failed once is tried again by the next run: most of what goes wrong once does not go wrong twice.
RECORD_FAILURE = """
    insert into passed_over_records as known
        (batch, record, key, failures, first_failed_at, last_failed_at, retry_at, error)
    select %(batch)s, %(record)s, %(key)s, 1, at, at, at, %(error)s from clock_timestamp() as at
    on conflict (batch, record, key) do update set
        failures = known.failures + 1, last_failed_at = excluded.last_failed_at, error = excluded.error,
        retry_at = excluded.last_failed_at
            + least(%(first)s * power(2, least(known.failures, 20) - 1), %(longest)s)
"""


class Known(NamedTuple):
    """The bad records of a kind: all of them, and those of them whose time has not come."""

    all: frozenset[int]
    waiting: frozenset[int]


class PassedOver(Base):
    """A record that a batch passes over until *retry_at*."""

    used_by = Use(SEEN, WRITES)

    batch = pw.TextField()
    record = pw.TextField()
    key = pw.TextField()
    failures = pw.IntegerField(constraints=default("1"))
    first_failed_at = DateTimeTZField()
    last_failed_at = DateTimeTZField()
    retry_at = DateTimeTZField()
    error = pw.TextField()

    class Meta:
        table_name = "passed_over_records"
        primary_key = pw.CompositeKey("batch", "record", "key")

    @classmethod
    def of(cls, batch: str, record: str) -> Known:
        """Return the keys of the batch's bad records of a kind."""
        rows = database.execute_sql(KNOWN, {"batch": batch, "record": record}).fetchall()
        return Known(frozenset(int(row[0]) for row in rows), frozenset(int(row[0]) for row in rows if row[1]))

    @classmethod
    def fail(cls, batch: str, record: str, key: int, error: str) -> None:
        """Pass the record over: until the next run at first, then for a while that doubles each time."""
        values = {"batch": batch, "record": record, "key": str(key), "error": error}
        with writing():
            database.execute_sql(RECORD_FAILURE, values | {"first": FIRST_PAUSE, "longest": LONGEST_PAUSE})

    @classmethod
    def forget(cls, batch: str, record: str, keys: Iterable[int]) -> int:
        """Know no more of these; return how many were known."""
        which = (cls.batch == batch, cls.record == record, cls.key.in_([str(key) for key in keys]))
        with writing():
            return int(cls.delete().where(*which).execute())

    @classmethod
    def forget_old(cls, horizon: datetime) -> int:
        """Know no more of what has not failed since *horizon*; return how many there were."""
        return int(cls.delete().where(cls.last_failed_at < horizon).execute())

    @classmethod
    def oldest_first(cls) -> pw.ModelSelect[PassedOver]:
        """Select all that are known."""
        return cls.select().order_by(cls.first_failed_at, cls.batch, cls.record, cls.key)

    @classmethod
    def counts(cls) -> dict[str, int]:
        """Count them by batch."""
        return dict(database.execute_sql("select batch, count(*) from passed_over_records group by batch").fetchall())

    @classmethod
    def retry(cls, key: str | None, *, batch: str | None = None) -> int:
        """Let the next run try these again, all of them if *key* is None; return how many."""
        change = cls.update(retry_at=pw.fn.clock_timestamp())
        if key is not None:
            change = change.where(cls.key == key)
        if batch is not None:
            change = change.where(cls.batch == batch)
        return int(change.execute())
