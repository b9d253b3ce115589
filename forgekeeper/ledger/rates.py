"""Rates of batches: records deleted in the last hour, time for a backlog, bytes of a week."""

from __future__ import annotations

from typing import NamedTuple

from forgekeeper.platform.database import database

# Runs are found by their end, which has an index; deletions of children count to their run.
FIND_RATES = """
    with ended as (
        select id, batch, started_at from job_runs
        where finished_at > clock_timestamp() - interval '1 hour' and started_at is not null
    )
    select batch, coalesce(sum(total.records), 0)::float
        / greatest(extract(epoch from clock_timestamp() - min(started_at)), 60)::float
    from ended join run_totals as total using (batch) where total.run = ended.id group by batch
"""
SUM_BYTES_OF_WEEK = """
    select batch, sum(bytes)::bigint from run_totals
    where day > (clock_timestamp() at time zone 'UTC')::date - 7 group by batch having sum(bytes) > 0
"""


class Rate(NamedTuple):
    """Deleted *records* per second in the last hour, and *bytes* in seven days (UTC)."""

    records: float = 0.0
    bytes: int = 0

    def seconds_for(self, backlog: int | None) -> float | None:
        """Return the seconds that the batch needs for *backlog*; None if that is unknown."""
        if backlog == 0:
            return 0.0
        return None if backlog is None or not self.records else backlog / self.records


def find_rates() -> dict[str, Rate]:
    """Return the rate of each batch with recent deletions; needs a connection."""
    records = dict(database.execute_sql(FIND_RATES).fetchall())
    freed = dict(database.execute_sql(SUM_BYTES_OF_WEEK).fetchall())
    return {batch: Rate(records.get(batch, 0.0), freed.get(batch, 0)) for batch in records.keys() | freed.keys()}
