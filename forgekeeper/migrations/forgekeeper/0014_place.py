"""Where the installation's database is: its cluster, its name and its oid.  A copy has the same id in another place."""

import peewee as pw
from playhouse.migrate import SchemaMigrator

COLUMNS = """
    alter table installation
        add column cluster bigint, add column database_name text, add column database_oid bigint
"""
# An installation that upgrades is where it should be.  A role that may not ask for the cluster records no place; then
# `forgekeeper migrate` says what to grant.
RECORD = """
    do $$ begin
        update installation set (cluster, database_name, database_oid) = (
            select system_identifier, datname, oid from pg_control_system(), pg_database
            where datname = current_database()
        );
    exception when insufficient_privilege then
        null;
    end $$
"""


def up(_migrator: SchemaMigrator, db: pw.Database) -> None:
    db.execute_sql(COLUMNS)
    db.execute_sql(RECORD)
