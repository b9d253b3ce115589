"""Since when a batch is blocked, and why: a sentence for whoever has to mend it."""

import peewee as pw
from playhouse.migrate import SchemaMigrator

STATEMENTS = (
    """
    alter table batches
        add column blocked_since timestamptz,
        add column blocked_reason text,
        add column blocked_sentence text,
        add column child_blocked_at timestamptz
    """,
)


def up(_migrator: SchemaMigrator, db: pw.Database) -> None:
    for statement in STATEMENTS:
        db.execute_sql(statement)
