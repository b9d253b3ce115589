"""All tables that tests write to, how they are emptied, and what a test lets PostgreSQL do to changes of their rows."""

from contextlib import contextmanager

import models
from forgekeeper.cli.migrate import OWN_TABLES
from forgekeeper.platform import database as db
from forgekeeper.platform.installation import Installation

TABLES = [model._meta.table_name for model in (*OWN_TABLES, *models.FORGE_MODELS) if model is not Installation]

# Truncating the audit's partitions with all their indexes takes 35 ms of the machine: those that a test has not touched
# have neither rows, dead ones included, nor figures for the planner.
SELECT_TOUCHED_TABLES = """
    select oid::regclass::text
    from unnest(%s) as name left join pg_partition_tree(name::regclass) on true
    join pg_class on oid = coalesce(relid, name::regclass)
    where relkind = 'r' and (pg_relation_size(oid) > 0 or reltuples <> -1)
"""
# Of these sequences alone, in every plan: asked of a table, `pg_sequence_last_value` is an error, and so it is of a
# sequence that another session drops just then.
RESET_SEQUENCES = """
    with ours as materialized (
        select seqrelid, seqstart
        from unnest(%s) as name join pg_depend on refobjid = name::regclass join pg_sequence on seqrelid = objid
    )
    select setval(seqrelid, seqstart, false) from ours where pg_sequence_last_value(seqrelid) is not null
"""
# Only a table has such triggers; a view of another is called as it is, but for the mark of one in parts.
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
    """Let this thread's session wait for a lock for as long as a test holds it, on however busy a machine."""
    db.database.execute_sql("set lock_timeout = '60s'")


def sessions_waiting_for_a_lock():
    """Count them as of now, within a transaction, too."""
    return db.database.execute_sql(WAITING).fetchone()[0]


def somebody_waits_for_a_lock():
    """Say it as of now."""
    return sessions_waiting_for_a_lock() > 0


@contextmanager
def before_each(change, table, act):
    """Let PostgreSQL do *act* before each *change*, an update or a deletion, of a row of the table, or below the view."""
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
    """Empty all tables, and number from 1.  Only the owner of the server may empty the audit."""
    if touched := [name for (name,) in db.database.execute_sql(SELECT_TOUCHED_TABLES, [TABLES])]:
        db.database.execute_sql("set session_replication_role = replica")
        db.database.execute_sql(f"truncate {', '.join(touched)}")
        db.database.execute_sql("set session_replication_role = default")
    db.database.execute_sql(RESET_SEQUENCES, [TABLES])
