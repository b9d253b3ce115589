"""Releases of before, which opened the breaker for a day whatever was due: none of them counts any more."""

import peewee as pw
from playhouse.migrate import SchemaMigrator


def up(_migrator: SchemaMigrator, db: pw.Database) -> None:
    db.execute_sql("update batches set released_at = null, released_run = null where released_at is not null")
