"""Since when a batch is paused: whoever forgot it is reminded a day later."""

import peewee as pw
from playhouse.migrate import SchemaMigrator

STATEMENTS = (
    "alter table batches add column paused_since timestamptz",
    "update batches set paused_since = clock_timestamp() where paused_until is not null",
)


def up(_migrator: SchemaMigrator, db: pw.Database) -> None:
    for statement in STATEMENTS:
        db.execute_sql(statement)
