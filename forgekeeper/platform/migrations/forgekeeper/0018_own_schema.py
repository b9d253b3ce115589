"""Our tables lie in a schema of their own, and the outbox has a name that no forge uses.

What is elsewhere moves.  Processes of the last version work on views in its place, and start by a copy of the list of
migrations; the next release drops both.
"""

from playhouse.migrate import SchemaMigrator

from forgekeeper.platform.database.sessions import Database
from forgekeeper.platform.migrations import make_schema

OLDEST_SURVIVOR = "0017_one_quarantine"
"""Processes that do not know it work on the view `passed_over_records`, which goes."""

MOVE = """
do $$
declare
    ours constant text := '{schema}';
    home constant text := current_schema();
    -- Nothing of a new installation is in use.
    in_use constant boolean := exists (select from installation where made_at < now());
    tables constant text[] := array[
        'audit_acts', 'audit_deletions', 'batches', 'deleted_objects', 'feature_flags', 'forgekeeper_migrations',
        'holds', 'installation', 'job_runs', 'processes', 'quarantine', 'run_totals', 'settled_uploads'
    ];
    part regclass;
    name text;
    shown text;
    grantee text;
    given record;
begin
    drop view passed_over_records;
    alter table ci_deleted_objects rename to deleted_objects;
    alter index ci_deleted_objects_pkey rename to deleted_objects_pkey;
    alter index ci_deleted_objects_pick_up_at_id rename to deleted_objects_pick_up_at_id;
    alter index ci_deleted_objects_store_dir_file rename to deleted_objects_store_dir_file;
    alter sequence ci_deleted_objects_id_seq rename to deleted_objects_id_seq;
    if home <> ours then
        foreach part in array array(
            select one::regclass from unnest(tables) as one
            union
            select relid from unnest(tables) as one, pg_partition_tree(one::regclass)
        ) loop
            execute format('alter table %s set schema %I', part, ours);
        end loop;
        foreach name in array array[
            'audit_drop(timestamptz)', 'audit_partitions(timestamptz)', 'audit_refuse()', 'batches_changed()',
            'holds_changed()', 'project_holds(text)'
        ] loop
            execute format('alter function %I.%s set schema %I', home, name, ours);
            if name <> 'audit_refuse()' then
                execute format('alter function %I.%s set search_path = %I, pg_temp', ours, name, ours);
            end if;
        end loop;
        perform set_config('search_path', ours || ', ' || current_setting('search_path'), true);
    end if;
    if not in_use then
        return;
    end if;
    foreach name in array tables loop
        shown := case name when 'deleted_objects' then 'ci_deleted_objects' else name end;
        continue when home = ours and shown = name;
        execute format('create %s %I.%I as table %I',
            case name when 'forgekeeper_migrations' then 'table' else 'view' end, home, shown, name);
        -- Whatever role could use the table can use it where it is now, and what stands in its place.
        for given in
            select acl.*, null as attname from pg_class, aclexplode(relacl) as acl where oid = name::regclass
            union all
            select acl.*, attname from pg_attribute, aclexplode(attacl) as acl where attrelid = name::regclass
        loop
            continue when given.privilege_type not in ('SELECT', 'INSERT', 'UPDATE', 'DELETE');
            grantee := case given.grantee when 0 then 'public' else given.grantee::regrole::text end;
            execute format('grant usage on schema %I to %s', ours, grantee);
            execute format('grant %s%s on %I.%I to %s', given.privilege_type,
                '(' || quote_ident(given.attname) || ')', home, shown, grantee);
        end loop;
    end loop;
    if home <> ours then
        execute format('create function %I.audit_partitions(timestamptz) returns void language sql
            as ''select %I.audit_partitions($1)''', home, ours);
        execute format('create function %I.audit_drop(timestamptz) returns integer language sql
            as ''select %I.audit_drop($1)''', home, ours);
    end if;
end $$;
"""


def up(_migrator: SchemaMigrator, database: Database) -> None:
    """Move them."""
    make_schema(database, database.schema)
    database.execute_sql(MOVE.replace("{schema}", database.schema).replace("%", "%%"))
