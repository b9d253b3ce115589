"""What has become of direct uploads, remembered beside Redis."""

import peewee as pw
from playhouse.migrate import SchemaMigrator

STATEMENTS = (
    """
    create table settled_uploads (
        location text not null,
        path text not null,
        reaped boolean not null,
        settled_at timestamptz not null default clock_timestamp(),
        run bigint,
        primary key (location, path)
    )
    """,
    "create index settled_uploads_settled_at on settled_uploads (settled_at)",
)


def up(_migrator: SchemaMigrator, db: pw.Database) -> None:
    for statement in STATEMENTS:
        db.execute_sql(statement)
