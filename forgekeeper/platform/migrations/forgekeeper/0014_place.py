"""Where the installation's database is: cluster, name and oid.  A copy has the same id in another place."""

from forgekeeper.platform.migrations import sql

up = sql("""
alter table installation
    add column cluster bigint, add column database_name text, add column database_oid bigint;
-- An installation that upgrades is where it should be.  A role that may not ask for the cluster records no place, and
-- `forgekeeper migrate` says what to grant.
do $$ begin
    update installation set (cluster, database_name, database_oid) = (
        select system_identifier, datname, oid from pg_control_system(), pg_database
        where datname = current_database()
    );
exception when insufficient_privilege then
    null;
end $$;
""")
