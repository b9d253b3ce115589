"""Reasons why lookups may miss rows that exist, read from PostgreSQL's catalogue.

A batch that deletes objects without a row trusts an empty result.  PostgreSQL returns an empty result, without an
error, if an index is sorted by another version of its collation, if the detachment of a partition was interrupted, or
if a setting lets damaged pages count as empty.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from forgekeeper.platform.database.sessions import execute_prepared

# Partitions and children that inherit are parts of their table.  A collation without a recorded version never changes
# (C, POSIX), or is older than PostgreSQL's records: then `refresh version` refuses it, and nobody could end a block.
SELECT_REASONS = """
    with recursive tree (oid) as (
        select unnest(%(relations)s::oid[])
      union
        select inhrelid from tree, pg_inherits where inhparent = tree.oid
    ), indexes as materialized (
        select indexrelid::regclass::text as name, indrelid::regclass::text as of_table, indcollation,
            indisready and indislive as is_kept_up
        from pg_index where indrelid = any(array(select oid from tree)) and indisvalid
    ), sorted as (
        select unnest(indcollation) as by, name, of_table from indexes
      union all
        select unnest(partcollation), null, partrelid::regclass::text
        from pg_partitioned_table where partrelid = any(array(select oid from tree))
    ), collations as materialized (
        select c.oid, c.oid::regcollation::text as name, collprovider = 'd' as is_default,
            case collprovider when 'd' then datcollversion else collversion end as recorded,
            case collprovider when 'd' then pg_database_collation_actual_version(d.oid)
                else pg_collation_actual_version(c.oid) end as actual
        from pg_collation as c, pg_database as d
        where c.oid = any(array(select by from sorted)) and datname = current_database()
    )
    select 'detaching' as kind, inhrelid::regclass::text as name, inhparent::regclass::text as of_table,
        null as collation, null as recorded, null as actual, null as database
    from pg_inherits where inhparent = any(array(select oid from tree)) and inhdetachpending
  union all
    select 'not_kept_up', name, of_table, null, null, null, null from indexes where not is_kept_up
  union all
    select 'unlogged', null, oid::regclass::text, null, null, null, null
    from pg_class where oid = any(array(select oid from tree)) and relpersistence = 'u'
  union all
    (select distinct on (by)
        case when s.name is null then 'partitioned' when actual is null then 'unversioned'
            when is_default then 'default' else 'collation' end,
        s.name, of_table, c.name, recorded, actual, quote_ident(current_database())
    from collations as c join sorted as s on by = c.oid where recorded <> coalesce(actual, '')
    order by by, of_table, s.name nulls first)
  union all
    select 'setting', name, null, null, null, null, null
    from unnest(array['ignore_checksum_failure', 'zero_damaged_pages']) as name where current_setting(name)::boolean
  union all
    select 'no_triggers', null, null, null, null, null, null
    where current_setting('session_replication_role') = 'replica'
"""
SORTED_BY_VERSION = "index {name} of {of_table} is sorted by version {recorded} of collation {collation}"
REASON_SENTENCES = {
    "detaching": (
        "partition {name} is half detached from {of_table}, which hides its rows: run `alter table {of_table} detach"
        " partition {name} finalize`, and in the same transaction attach it again if its rows are needed"
    ),
    "not_kept_up": (
        "index {name} of {of_table} is used but not kept up to date: run `reindex index concurrently {name}` to add"
        " the missing rows"
    ),
    "unlogged": (
        "table {of_table} is unlogged, so a crash of PostgreSQL empties it: run `alter table {of_table} set logged`"
    ),
    "default": (
        f"{SORTED_BY_VERSION}, but the server has version {{actual}}: lookups may miss rows until you run `reindex"
        " database concurrently {database}`, then `alter database {database} refresh collation version`"
    ),
    "collation": (
        f"{SORTED_BY_VERSION}, but the server has version {{actual}}: lookups may miss rows until you run `reindex"
        " table concurrently {of_table}` for each table with this collation, then `alter collation {collation} refresh"
        " version`"
    ),
    "unversioned": (
        f"{SORTED_BY_VERSION}, but the server's library has no versions, so `refresh collation version` fails: lookups"
        " may miss rows until you run the server with the previous library, or dump and restore database {database}"
    ),
    "partitioned": (
        "{of_table} is partitioned by version {recorded} of collation {collation}, but the server has version {actual}:"
        " lookups may miss rows until you dump and restore the table, then refresh the version of the collation"
    ),
    "no_triggers": (
        "session_replication_role is replica, which disables triggers and foreign keys: reset it for this role, this"
        " database and the server"
    ),
    "setting": "{name} is on, so rows of damaged pages count as deleted: turn it off",
}


def reasons_to_miss_rows(relations: Collection[int]) -> Iterator[str]:
    """Yield a sentence, with its cure, for each reason why lookups in these tables may miss rows that exist.

    *relations* are oids; their partitions and children are checked, too.  One statement of one or two milliseconds
    reads the catalogue alone.  Invalid indexes are ignored, because no lookup uses them.
    """
    rows = execute_prepared("integrity", SELECT_REASONS, {"relations": list(relations)})
    columns = [column.name for column in rows.description]
    for row in rows.fetchall():
        facts = dict(zip(columns, row, strict=True))
        yield REASON_SENTENCES[facts["kind"]].format_map(facts)
