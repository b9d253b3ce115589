"""How much each run has deleted, its children included, day by day: what the brakes go by."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

import peewee as pw

from forgekeeper.database import Base, database, default
from forgekeeper.database.use import WORK, Use

TODAY = "(clock_timestamp() at time zone 'UTC')::date"
ADD = f"""
    insert into run_totals (batch, run, day, records, bytes, reserved)
    values (%(batch)s, %(run)s, {TODAY}, %(records)s, %(bytes)s, %(reserved)s)
    on conflict (batch, run, day) do update set records = run_totals.records + excluded.records,
        bytes = run_totals.bytes + excluded.bytes, reserved = run_totals.reserved + excluded.reserved
"""
# One at a time may reserve: the row of the batch is the lock.
LOCK = "select from batches where name = %(batch)s for no key update"
USED = f"""
    select coalesce(sum(greatest(records, reserved)) filter (where run = %(run)s), 0)::bigint,
        coalesce(sum(greatest(records, reserved)) filter (where day = {TODAY}), 0)::bigint,
        coalesce(sum(bytes) filter (where run = %(run)s), 0)::bigint,
        coalesce(sum(bytes) filter (where day = {TODAY}), 0)::bigint
    from run_totals where batch = %(batch)s and (run = %(run)s or day = {TODAY})
"""
# A batch with no more than so many runs keeps them all.
DELETE_OLD = """
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
LAST = 100
"""So many runs of each batch are remembered: by them a brake tells what is out of proportion."""


class Used(NamedTuple):
    """What a run, and all runs of this day (UTC), have deleted or may delete yet."""

    run: int
    day: int
    run_bytes: int
    day_bytes: int


class RunTotal(Base):
    """What one run has deleted on one day, and how many records it has reserved: a crash leaves those used up."""

    used_by = Use(WORK, (("insert", (), WORK), ("update", (), WORK), ("delete", (), WORK)))

    batch = pw.TextField()
    run = pw.BigIntegerField()
    day = pw.DateField()
    records = pw.BigIntegerField(constraints=default("0"))
    bytes = pw.BigIntegerField(constraints=default("0"))
    reserved = pw.BigIntegerField(constraints=default("0"))

    class Meta:
        table_name = "run_totals"
        primary_key = pw.CompositeKey("batch", "run", "day")

    @classmethod
    def add(cls, batch: str, run: int, *, records: int = 0, bytes: int = 0, reserved: int = 0) -> None:  # noqa: A002
        """Add to what the run has deleted and reserved today; less than nothing gives back what it had reserved."""
        values = {"batch": batch, "run": run, "records": records, "bytes": bytes, "reserved": reserved}
        database.execute_sql(ADD, values)

    @classmethod
    def lock(cls, batch: str) -> None:
        """Let nobody else reserve until this transaction ends."""
        database.execute_sql(LOCK, {"batch": batch})

    @classmethod
    def used(cls, batch: str, run: int) -> Used:
        """Say what is used up of the limits of a run and of a day."""
        return Used(*database.execute_sql(USED, {"batch": batch, "run": run}).fetchone())

    @classmethod
    def delete_old(cls, horizon: datetime, *, limit: int) -> int:
        """Remove up to *limit* totals of days before *horizon*, but the last runs of each batch; return how many."""
        values = {"horizon": horizon, "limit": limit, "keep": LAST}
        count: int = database.execute_sql(DELETE_OLD, values).rowcount
        return count
