"""Bring a database's schema up to date, one process at a time.  An operator's own tables are never touched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import peewee as pw
from playhouse.migrate import SchemaMigrator
from playhouse.migrations import Runner

DUPLICATE_TABLE = "42P07"
LOCK = 0x666F7267656B
"""The advisory lock of all migrations: the letters ``forgek``."""


class Set(NamedTuple):
    """Migrations: the folder of their files, and the table that lists those that were applied."""

    folder: Path
    table: str


OWN = Set(Path(__file__).parent / "forgekeeper", "forgekeeper_migrations")


class TableExists(Exception):
    """A table that a migration creates is there already; nothing was changed."""


def newest() -> str:
    """Name the newest migration that this version knows."""
    return max(file.stem for file in OWN.folder.glob("[0-9]*.py"))


def pending(database: pw.Database, which: Set = OWN) -> list[str]:
    """Name the migrations that have not been applied, in their order."""
    return [migration.name for migration in _runner(database, which).status() if not migration.applied]


def migrate(database: pw.Database, which: Set = OWN) -> list[str]:
    """Apply what is pending, all or nothing; return the names.

    A second process waits for the first and then finds nothing to do.  Raises
    `TableExists` when a table to be created is already there.
    """
    try:
        with database.atomic():
            # However long the other takes: a session's patience is meant for rows.
            database.execute_sql("set local lock_timeout = 0")
            database.execute_sql("set local statement_timeout = 0")
            database.execute_sql("select pg_advisory_xact_lock(%s)", (LOCK,))
            applied: list[str] = _runner(database, which).up()
    except pw.ProgrammingError as error:
        if getattr(getattr(error, "orig", None), "pgcode", None) != DUPLICATE_TABLE:
            raise
        raise TableExists(str(error).splitlines()[0]) from None
    return applied


def _runner(database: pw.Database, which: Set) -> Runner:
    return Runner(database, str(which.folder), table_name=which.table)


def sql(statements: str) -> Callable[[SchemaMigrator, pw.Database], None]:
    """Return the `up` of a migration that executes these statements, in which {schema} is the current schema."""

    def up(_migrator: SchemaMigrator, database: pw.Database) -> None:
        schema = database.execute_sql("select quote_ident(current_schema())").fetchone()[0]
        # psycopg2 takes a percent sign for a parameter.
        database.execute_sql(statements.replace("{schema}", schema).replace("%", "%%"))

    return up
