"""A batch that has lived: ordinary runs of it in the ledger, and what each has deleted."""

from forgekeeper.platform.database import database as db

# The numbers are drawn first: thousands of runs are not to be found again by their times.
RUNS = """
    with drawn as materialized (
        select nextval(pg_get_serial_sequence('job_runs', 'id')) as id, at, records from (
            select clock_timestamp() - ago * interval '1 second' as at, records
            from unnest(%(ago)s::float[], %(records)s::bigint[]) as run (ago, records) order by at
        ) as ordered
    ), runs as (
        insert into job_runs (id, batch, state, started_at, finished_at, claimed_at, ordinary, result)
        overriding system value select id, %(batch)s, 'succeeded', at, at, at, true, '{}' from drawn
    )
    insert into run_totals (batch, run, day, records)
    select %(batch)s, id, at::date, records from drawn where records > 0
"""


def add_past_runs(batch, ago, records):
    """Write down runs of so many seconds *ago*, and how many records each has deleted: a number, or one for each."""
    each = records if isinstance(records, list) else [records] * len(ago)
    with db.atomic():
        # Tens of thousands of runs: a busy machine may take long.
        db.execute_sql("set local statement_timeout = 0")
        db.execute_sql(RUNS, {"batch": batch.name, "ago": list(ago), "records": each})
