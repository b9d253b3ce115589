"""Which installation this database is of: an id, so that no other's repositories or objects are taken for its own."""

import peewee as pw
from playhouse.migrate import SchemaMigrator

STATEMENTS = (
    """
    create table installation (
        id uuid primary key default gen_random_uuid(),
        made_at timestamptz not null default clock_timestamp()
    )
    """,
    "create unique index one_installation on installation ((true))",
    "insert into installation default values",
)


def up(_migrator: SchemaMigrator, db: pw.Database) -> None:
    for statement in STATEMENTS:
        db.execute_sql(statement)
