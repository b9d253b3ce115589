"""Empty the tables of the test database, and observe or change its sessions and rows."""

from contextlib import contextmanager

import models
from forgekeeper.cli.migrate import OWN_TABLES
from forgekeeper.platform import database as db
from forgekeeper.platform.installation import Installation

TABLES = [model._meta.table_name for model in (*OWN_TABLES, *models.FORGE_MODELS) if model is not Installation]

# Truncating all partitions of the audit takes 35 ms of CPU time.  Partitions that a test has not touched have no rows,
# neither live nor dead, and no statistics.
SELECT_TOUCHED_TABLES = """
    select oid::regclass::text
    from unnest(%s) as name left join pg_partition_tree(name::regclass) on true
    join pg_class on oid = coalesce(relid, name::regclass)
    where relkind = 'r' and (pg_relation_size(oid) > 0 or reltuples <> -1)
"""
# Materialized, so that every plan calls `pg_sequence_last_value` for these sequences only: it raises an error for a table,
# and for a sequence that another session is dropping.
RESET_SEQUENCES = """
    with ours as materialized (
        select seqrelid, seqstart
        from unnest(%s) as name join pg_depend on refobjid = name::regclass join pg_sequence on seqrelid = objid
    )
    select setval(seqrelid, seqstart, false) from ours where pg_sequence_last_value(seqrelid) is not null
"""
# Only a table can have row triggers: find the table below a view, whose name is the same or has the prefix `p_`.
SELECT_TABLE_BELOW_VIEW = """
    select case when relkind = 'v' then coalesce(to_regclass('gitlab.p_' || relname), to_regclass('gitlab.' || relname))
        else oid end::regclass::text
    from pg_class where oid = %s::regclass
"""
WAITING = """
    select pg_stat_clear_snapshot();
    select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'
"""


def wait_for_locks():
    """Let this thread's session wait up to 60 s for a lock, for a busy machine."""
    db.database.execute_sql("set lock_timeout = '60s'")


def sessions_waiting_for_a_lock():
    """Count the sessions that wait for a lock now, also within a transaction."""
    return db.database.execute_sql(WAITING).fetchone()[0]


def somebody_waits_for_a_lock():
    """Return whether a session waits for a lock now."""
    return sessions_waiting_for_a_lock() > 0


@contextmanager
def before_each(change, table, act):
    """Execute *act* in a trigger before each *change* (update or delete) of a row of the table, or of the table below a view."""
    (table,) = db.database.execute_sql(SELECT_TABLE_BELOW_VIEW, (table,)).fetchone()
    row = "old" if change == "delete" else "new"
    db.database.execute_sql(
        f"create function spoil() returns trigger language plpgsql as $$ begin {act}; return {row}; end $$;"
        f"create trigger spoil before {change} on {table} for each row execute function spoil()"
    )
    try:
        yield
    finally:
        db.database.execute_sql("drop function spoil cascade")


def empty():
    """Empty all tables, and reset their sequences.  Only a superuser may empty the audit."""
    if touched := [name for (name,) in db.database.execute_sql(SELECT_TOUCHED_TABLES, [TABLES])]:
        db.database.execute_sql(f"set local session_replication_role = replica; truncate {', '.join(touched)}")
    db.database.execute_sql(RESET_SEQUENCES, [TABLES])
