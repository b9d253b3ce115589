"""Insert earlier runs of a batch into the ledger, with the numbers of deleted records."""

from forgekeeper.platform.database import database as db

# The ids are drawn first: finding thousands of runs again by their times would be slow.
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
    """Insert runs that ended *ago* seconds before now and deleted *records*: one number for all, or a list."""
    each = records if isinstance(records, list) else [records] * len(ago)
    with db.atomic():
        # Inserting tens of thousands of runs may take long on a busy machine.
        db.execute_sql("set local statement_timeout = 0")
        db.execute_sql(RUNS, {"batch": batch.name, "ago": list(ago), "records": each})
