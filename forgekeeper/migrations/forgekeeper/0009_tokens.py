"""What tells a run, and an attempt at it, from another of the same number in a database that came back older."""

import peewee as pw
from playhouse.migrate import SchemaMigrator


def up(_migrator: SchemaMigrator, db: pw.Database) -> None:
    db.execute_sql(
        "alter table job_runs add column token uuid not null default gen_random_uuid(), add column attempt_token uuid"
    )
