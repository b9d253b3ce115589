"""Records that could not be worked on alone: passed over for a growing while."""

import peewee as pw
from playhouse.migrate import SchemaMigrator

STATEMENTS = (
    """
    create table passed_over_records (
        batch text not null,
        record text not null,
        key text not null,
        failures integer not null default 1,
        first_failed_at timestamptz not null,
        last_failed_at timestamptz not null,
        retry_at timestamptz not null,
        error text not null,
        primary key (batch, record, key)
    )
    """,
)


def up(_migrator: SchemaMigrator, db: pw.Database) -> None:
    for statement in STATEMENTS:
        db.execute_sql(statement)
