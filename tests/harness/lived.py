"""A batch that has lived: ordinary runs of it in the ledger, and what each has deleted."""

from forgekeeper.database import database as db

RUNS = """
    with drawn as (
        select at, records from unnest(%(ago)s::float[], %(records)s::bigint[]) as run (ago, records),
            lateral (select clock_timestamp() - ago * interval '1 second' as at) as times
    ), runs as (
        insert into job_runs (batch, state, started_at, finished_at, claimed_at, ordinary, result)
        select %(batch)s, 'succeeded', at, at, at, true, '{}' from drawn order by at
        returning id, started_at
    )
    insert into run_totals (batch, run, day, records)
    select %(batch)s, id, started_at::date, records from runs join drawn on at = started_at where records > 0
"""


def lived(batch, ago, records):
    """Write down runs of so many seconds *ago*, and how many records each has deleted: a number, or one for each."""
    each = records if isinstance(records, list) else [records] * len(ago)
    db.execute_sql(RUNS, {"batch": batch.name, "ago": list(ago), "records": each})
