"""How a migration is written: as SQL."""

from __future__ import annotations

from collections.abc import Callable

import peewee as pw
from playhouse.migrate import SchemaMigrator


def sql(statements: str) -> Callable[[SchemaMigrator, pw.Database], None]:
    """Return the `up` of a migration that executes these statements, in which {schema} is the current schema."""

    def up(_migrator: SchemaMigrator, database: pw.Database) -> None:
        schema = database.execute_sql("select quote_ident(current_schema())").fetchone()[0]
        # psycopg2 takes a percent sign for a parameter.
        database.execute_sql(statements.replace("{schema}", schema).replace("%", "%%"))

    return up
