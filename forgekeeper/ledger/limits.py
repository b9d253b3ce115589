"""Totals of runs: deletions by day, children included, and the rest that limits leave."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import date, datetime
from typing import Literal, NamedTuple

import peewee as pw

from forgekeeper.ledger.holds import Batch
from forgekeeper.platform.database import Base, database, default_sql
from forgekeeper.platform.database.sessions import execute_prepared

StopReason = Literal["stopped", "held", "cancelled", "max_per_run", "max_per_day", "release_used_up"]
UNLIMITED = 2**62
"""A number above every limit: unlimited."""

TODAY_UTC = "(clock_timestamp() at time zone 'UTC')::date"
UPSERT_TOTALS = f"""
    insert into run_totals (batch, run, day, records, bytes, reserved, reserved_bytes)
    values (%(batch)s, %(run)s, coalesce(%(day)s, {TODAY_UTC}),
        %(records)s, %(bytes)s, %(reserved)s, %(reserved_bytes)s)
    on conflict (batch, run, day) do update set records = run_totals.records + excluded.records,
        bytes = run_totals.bytes + excluded.bytes, reserved = run_totals.reserved + excluded.reserved,
        reserved_bytes = run_totals.reserved_bytes + excluded.reserved_bytes
"""
# Counts on the day of the reservation.  An attempt without limits has reserved nothing.
UPDATE_EARLIER_TOTALS = """
    update run_totals set records = records + %(deleted)s, reserved = reserved - %(of)s
    where (batch, run, day) = (
        select batch, run, day from run_totals
        where batch = %(batch)s and run = %(run)s and reserved >= %(of)s order by day desc limit 1
    )
"""
# The row of the batch is the lock: one process at a time reserves.
LOCK_BATCH_ROW = "select name from batches where name = %s for no key update"
USED_OF_RELEASE = """coalesce((
    select sum(records + reserved) from run_totals where batch = name and run >= coalesce(released_run, %(run)s)
), 0)"""
"""Records of a release that are deleted or reserved, by a row of `batches`."""
# A release counts the deletions of all runs, beginning with its first run.
SELECT_USAGE = f"""
    select today.day,
        coalesce(sum(records + reserved) filter (where run = %(run)s), 0)::bigint,
        coalesce(sum(records + reserved) filter (where used.day = today.day), 0)::bigint,
        coalesce(sum(bytes + reserved_bytes) filter (where run = %(run)s), 0)::bigint,
        coalesce(sum(bytes + reserved_bytes) filter (where used.day = today.day), 0)::bigint,
        (select (released_expect - {USED_OF_RELEASE})::bigint from batches
            where name = %(batch)s and released_at is not null)
    from (select {TODAY_UTC} as day) as today
    left join run_totals as used on batch = %(batch)s and (run = %(run)s or used.day = today.day)
    group by today.day
"""
SUM_BY_DAY = """
    select batch, %(today)s::date - day, sum(records)::bigint from run_totals
    where day > %(today)s::date - %(days)s and day <= %(today)s::date group by batch, day
"""
SUM_OF_RUNS = """
    select run, sum(records)::bigint, sum(bytes)::bigint from run_totals
    where batch = %(batch)s and run = any(%(runs)s::bigint[]) group by run
"""
# All totals stay while a batch has no more than *keep* runs.
DELETE_OLD_TOTALS = """
    with first as (
        select name as batch, (
            select run from (select distinct run from run_totals where batch = name order by run desc) as newest
            offset %(keep)s - 1 limit 1
        ) as kept
        from batches
    )
    delete from run_totals where (batch, run, day) in (
        select batch, run, day from run_totals join first using (batch) where run < kept and day < %(horizon)s::date
        limit %(limit)s for update of run_totals skip locked
    )
"""
KEPT_RUNS_PER_BATCH = 100
"""Runs of each batch whose totals are kept: the breaker compares with them."""


class Amount(NamedTuple):
    """A number of records, and their bytes."""

    records: int = 0
    bytes: int = 0


NO_AMOUNT = Amount()


class LimitUsage(NamedTuple):
    """Records and bytes that a run, and all runs of *today* (UTC), have deleted or reserved.

    *released* is the rest of the batch's release; None if it has no release, or the release has no amount.
    """

    today: date
    run_records: int
    day_records: int
    run_bytes: int
    day_bytes: int
    released: int | None


class RunTotal(Base):
    """The deletions of one run on one day, and the further reservations of its attempts.

    A crash leaves reservations used up.  A record counts on the day on which its chunk was reserved.  *expect* is for
    processes of older versions.
    """

    grants = "worker: select, insert, update, delete; exporter: select"

    batch = pw.TextField()
    run = pw.BigIntegerField()
    day = pw.DateField()
    records = pw.BigIntegerField(constraints=default_sql("0"))
    bytes = pw.BigIntegerField(constraints=default_sql("0"))
    reserved = pw.BigIntegerField(constraints=default_sql("0"))
    reserved_bytes = pw.BigIntegerField(constraints=default_sql("0"))
    expect = pw.BigIntegerField(null=True)

    class Meta:
        table_name = "run_totals"
        primary_key = pw.CompositeKey("batch", "run", "day")

    @classmethod
    def add(
        cls, batch: str, run: int, did: Amount = NO_AMOUNT, reserved: Amount = NO_AMOUNT, *, day: date | None = None
    ) -> None:
        """Add a run's deletions and reservations on *day*, or today; reservations may decrease."""
        values = {"records": did.records, "bytes": did.bytes}
        values |= {"reserved": reserved.records, "reserved_bytes": reserved.bytes}
        database.execute_sql(UPSERT_TOTALS, values | {"batch": batch, "run": run, "day": day})

    @classmethod
    def settle_earlier(cls, batch: str, run: int, deleted: int, *, of_reserved: int) -> bool:
        """Count *deleted* of *of_reserved* records of an earlier attempt; False if it reserved none."""
        values = {"batch": batch, "run": run, "deleted": deleted, "of": of_reserved}
        return bool(database.execute_sql(UPDATE_EARLIER_TOTALS, values).rowcount)

    @classmethod
    def lock_batch(cls, batch: str) -> None:
        """Lock the batch, so that no other process reserves until this transaction ends."""
        if database.execute_sql(LOCK_BATCH_ROW, (batch,)).fetchone() is None:
            Batch.register([batch])
            database.execute_sql(LOCK_BATCH_ROW, (batch,))

    @classmethod
    def read_usage(cls, batch: str, run: int) -> LimitUsage:
        """Return how much of the limits of a run and a day is used up."""
        return LimitUsage(*execute_prepared("usage", SELECT_USAGE, {"batch": batch, "run": run}).fetchone())

    @classmethod
    def sum_by_day(cls, today: date, days: int) -> dict[str, list[int]]:
        """Return each batch's deleted records on *today* (UTC) and on the *days* - 1 days before."""
        found: dict[str, list[int]] = defaultdict(lambda: [0] * days)
        for batch, ago, records in database.execute_sql(SUM_BY_DAY, {"today": today, "days": days}).fetchall():
            found[batch][ago] = records
        return found

    @classmethod
    def sum_of_batch(cls, batch: str) -> int:
        """Add up the deletions of all runs of the batch that have totals."""
        found: int = cls.select(pw.fn.coalesce(pw.fn.sum(cls.records), 0)).where(cls.batch == batch).scalar()
        return int(found)

    @classmethod
    def sum_of_runs(cls, batch: str, runs: Sequence[int]) -> dict[int, Amount]:
        """Add up the deletions of each run; a run without deletions is left out."""
        rows = database.execute_sql(SUM_OF_RUNS, {"batch": batch, "runs": list(runs)}).fetchall()
        return {run: Amount(records, size) for run, records, size in rows}

    @classmethod
    def delete_old(cls, horizon: datetime, *, limit: int) -> int:
        """Delete up to *limit* totals before *horizon*, and return the number.

        Totals of each batch's last runs stay.
        """
        return int(
            database.execute_sql(
                DELETE_OLD_TOTALS, {"horizon": horizon, "limit": limit, "keep": KEPT_RUNS_PER_BATCH}
            ).rowcount
        )


NO_USAGE = LimitUsage(date.min, 0, 0, 0, 0, None)
"""Usage before any deletion: limits then leave their maximum."""


class RemainingLimit(NamedTuple):
    """The rest that limits leave, and the nearest limit; None if nothing is limited."""

    amount: int
    reason: StopReason | None


class DeletionLimits(NamedTuple):
    """Maximum records and bytes for each run and each day (UTC); None: unlimited."""

    per_run: int | None = None
    per_day: int | None = None
    bytes_per_run: int | None = None
    bytes_per_day: int | None = None

    @property
    def has_byte_limits(self) -> bool:
        """Whether bytes are limited."""
        return self.bytes_per_run is not None or self.bytes_per_day is not None

    def remaining_records(self, used: LimitUsage) -> RemainingLimit:
        """Return how many records are left; a release counts as a limit, too."""
        return _find_nearest(
            ("max_per_run", self.per_run, used.run_records),
            ("release_used_up", used.released, 0),
            ("max_per_day", self.per_day, used.day_records),
        )

    def remaining_bytes(self, used: LimitUsage) -> RemainingLimit:
        """Return how many bytes are left."""
        return _find_nearest(
            ("max_per_run", self.bytes_per_run, used.run_bytes), ("max_per_day", self.bytes_per_day, used.day_bytes)
        )


def _find_nearest(*limits: tuple[StopReason, int | None, int]) -> RemainingLimit:
    left = [RemainingLimit(max(0, limit - used), why) for why, limit, used in limits if limit is not None]
    return min(left, key=lambda one: one.amount, default=RemainingLimit(UNLIMITED, None))
