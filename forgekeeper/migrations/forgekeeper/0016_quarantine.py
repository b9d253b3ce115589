"""What failed and is tried again or waits for a person: for now children; more kinds are to follow."""

import peewee as pw
from playhouse.migrate import SchemaMigrator

STATEMENTS = (
    """
    create table quarantine (
        batch text not null,
        record text not null,
        key text not null,
        reason text not null,
        error text not null,
        failures integer not null default 1,
        since timestamptz not null,
        failed_at timestamptz not null,
        run bigint,
        primary key (batch, record, key)
    )
    """,
)


def up(_migrator: SchemaMigrator, db: pw.Database) -> None:
    for statement in STATEMENTS:
        db.execute_sql(statement)
