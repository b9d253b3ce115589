"""Bring a database's schema up to date, one process at a time.  An operator's own tables are never touched.

A migration that older processes cannot work with names, as `OLDEST_SURVIVOR`, the migration that a process has to know
to go on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import peewee as pw
from playhouse.migrate import SchemaMigrator
from playhouse.migrations import Runner

from forgekeeper.platform.database.sessions import SCHEMAS, Database

DUPLICATE_TABLE = "42P07"
LOCK = 0x666F7267656B
"""The advisory lock of all migrations: the letters ``forgek``."""


# Every schema that has the table: the right one first, then the one where a session finds it.
PLACES = """
    select nspname, pg_table_is_visible(c.oid) from pg_class as c join pg_namespace as n on n.oid = relnamespace
    where relname = %(table)s and relkind in ('r', 'p')
    order by nspname = %(schema)s desc, 2 desc
"""


class Set(NamedTuple):
    """Migrations: the folder of their files, the table that lists those that were applied, and whose they are."""

    folder: Path
    table: str
    ours: bool = True

    def schema(self, database: Database) -> str:
        """Name the schema of their tables."""
        return database.schema if self.ours else database.forge_schema


OWN = Set(Path(__file__).parent / "forgekeeper", "forgekeeper_migrations")


class TableExists(Exception):
    """A table that a migration creates is there already; nothing was changed."""


class Elsewhere(Exception):
    """Our tables are in a schema that no session looks into; nothing was changed."""


def newest() -> str:
    """Name the newest migration that this version knows."""
    return max(file.stem for file in OWN.folder.glob("[0-9]*.py"))


def pending(database: Database, which: Set = OWN) -> list[str]:
    """Name the migrations that have not been applied, in their order."""
    runner = _runner(database, which, schema=_place(database, which))
    return [migration.name for migration in runner.status() if not migration.applied]


def oldest_survivor(database: Database, which: Set = OWN) -> str | None:
    """Name the migration that a process has to know to work once all pending ones are applied.

    Returns None if processes of every age can.
    """
    runner = _runner(database, which, schema=_place(database, which))
    loaded = [migration.load() for migration in runner.status() if migration.path and not migration.applied]
    return max((one.OLDEST_SURVIVOR for one in loaded if hasattr(one, "OLDEST_SURVIVOR")), default=None)


def migrate(database: Database, which: Set = OWN) -> list[str]:
    """Apply what is pending, all or nothing; return the names.

    A second process waits for the first and then finds nothing to do.  The schema is made where there is none.
    Raises `TableExists` when a table to be created is already there, and `Elsewhere`.
    """
    try:
        with database.atomic():
            # However long the other takes: a session's patience is meant for rows.
            database.execute_sql("set local lock_timeout = 0")
            database.execute_sql("set local statement_timeout = 0")
            database.execute_sql("select pg_advisory_xact_lock(%s)", (LOCK,))
            _require_none_elsewhere(database, which)
            place = _place(database, which)
            make_schema(database, place)
            _first(database, place)
            applied: list[str] = _runner(database, which).up()
            _first(database, database.schema)
    except pw.ProgrammingError as error:
        if getattr(getattr(error, "orig", None), "pgcode", None) != DUPLICATE_TABLE:
            raise
        raise TableExists(str(error).splitlines()[0]) from None
    return applied


def _place(database: Database, which: Set) -> str:
    """Name the schema in which they were applied, where a session finds it; else the one that is theirs."""
    schema = which.schema(database)
    place, visible = _found(database, which) or (schema, True)
    return place if visible else schema


def _require_none_elsewhere(database: Database, which: Set) -> None:
    """Raise `Elsewhere` for tables of ours that lie where nobody has said: they would be made once more."""
    place, visible = _found(database, which) or (None, True)
    schema = which.schema(database)
    if not visible and place != schema == SCHEMAS[0]:
        raise Elsewhere(f"forgekeeper's tables are in schema {place}: set FORGEKEEPER_OWN_SCHEMA to {place}")


def _found(database: Database, which: Set) -> tuple[str, bool] | None:
    values = {"table": which.table, "schema": which.schema(database)}
    found: tuple[str, bool] | None = database.execute_sql(PLACES, values).fetchone()
    return found


def make_schema(database: Database, schema: str) -> None:
    """Make a schema that is not there; to make one takes a right that its owner need not have, also where it is."""
    if database.execute_sql("select to_regnamespace(%s) is null", (schema,)).fetchone()[0]:
        database.execute_sql(f"create schema {schema}")


def _first(database: Database, schema: str) -> None:
    """Let what this transaction creates be created in *schema*."""
    rest = f"{database.schema}, {database.forge_schema}"
    database.execute_sql(f"set local search_path = {schema}, {rest}, pg_catalog")


def _runner(database: pw.Database, which: Set, schema: str | None = None) -> Runner:
    return Runner(database, str(which.folder), table_name=which.table, schema=schema)


def sql(statements: str) -> Callable[[SchemaMigrator, pw.Database], None]:
    """Return the `up` of a migration that executes these statements, in which {schema} is the current schema."""

    def up(_migrator: SchemaMigrator, database: pw.Database) -> None:
        schema = database.execute_sql("select quote_ident(current_schema())").fetchone()[0]
        # psycopg2 takes a percent sign for a parameter.
        database.execute_sql(statements.replace("{schema}", schema).replace("%", "%%"))

    return up
