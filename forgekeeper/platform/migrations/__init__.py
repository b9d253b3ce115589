"""Migrations of our schema, by one process at a time; an operator's tables stay unchanged.

A migration that is incompatible with older processes sets `OLDEST_SURVIVOR`: the newest migration that a process must
know to continue.
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


# Every schema that has the table: the right schema first, then schemas that sessions search.
PLACES = """
    select nspname, pg_table_is_visible(c.oid) from pg_class as c join pg_namespace as n on n.oid = relnamespace
    where relname = %(table)s and relkind in ('r', 'p')
    order by nspname = %(schema)s desc, 2 desc
"""


class Set(NamedTuple):
    """A set of migrations: their folder, the table of applied migrations, and the owner."""

    folder: Path
    table: str
    ours: bool = True

    def schema(self, database: Database) -> str:
        """Return the schema of the set's tables."""
        return database.schema if self.ours else database.forge_schema


OWN = Set(Path(__file__).parent / "forgekeeper", "forgekeeper_migrations")


class TableExists(Exception):
    """A table that a migration creates exists already; nothing was changed."""


class Elsewhere(Exception):
    """Our tables are in a schema that no session searches; nothing was changed."""


def newest() -> str:
    """Return the name of the newest migration that this version knows."""
    return max(file.stem for file in OWN.folder.glob("[0-9]*.py"))


def pending(database: Database, which: Set = OWN) -> list[str]:
    """Return the names of the migrations that have not been applied, in order."""
    runner = _runner(database, which, schema=_place(database, which))
    return [migration.name for migration in runner.status() if not migration.applied]


def oldest_survivor(database: Database, which: Set = OWN) -> str | None:
    """Return the migration that a process must know to work after all pending migrations.

    Returns None if older processes of all versions can work.
    """
    runner = _runner(database, which, schema=_place(database, which))
    loaded = [migration.load() for migration in runner.status() if migration.path and not migration.applied]
    return max((one.OLDEST_SURVIVOR for one in loaded if hasattr(one, "OLDEST_SURVIVOR")), default=None)


def migrate(database: Database, which: Set = OWN) -> list[str]:
    """Apply all pending migrations in one transaction; return their names.

    A second process waits for the first and then finds nothing to do.  A missing schema is created.  Raises
    `TableExists` if a table to create exists already, and `Elsewhere`.
    """
    try:
        with database.atomic():
            # No limit for the wait for another process: a session's limits are meant for rows.
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
    """Return the schema with applied migrations if sessions search it, else the set's schema."""
    schema = which.schema(database)
    place, visible = _found(database, which) or (schema, True)
    return place if visible else schema


def _require_none_elsewhere(database: Database, which: Set) -> None:
    """Raise `Elsewhere` if our tables are in an unexpected schema, before others are created."""
    place, visible = _found(database, which) or (None, True)
    schema = which.schema(database)
    if not visible and place != schema == SCHEMAS[0]:
        raise Elsewhere(f"forgekeeper's tables are in schema {place}: set FORGEKEEPER_OWN_SCHEMA to {place}")


def _found(database: Database, which: Set) -> tuple[str, bool] | None:
    values = {"table": which.table, "schema": which.schema(database)}
    found: tuple[str, bool] | None = database.execute_sql(PLACES, values).fetchone()
    return found


def make_schema(database: Database, schema: str) -> None:
    """Create a missing schema.

    It is checked first: ``create schema`` needs a privilege that the schema's owner may lack, even if the schema
    exists.
    """
    if database.execute_sql("select to_regnamespace(%s) is null", (schema,)).fetchone()[0]:
        database.execute_sql(f"create schema {schema}")


def _first(database: Database, schema: str) -> None:
    """Put *schema* first in the search path: this transaction creates its tables there."""
    rest = f"{database.schema}, {database.forge_schema}"
    database.execute_sql(f"set local search_path = {schema}, {rest}, pg_catalog")


def _runner(database: pw.Database, which: Set, schema: str | None = None) -> Runner:
    return Runner(database, str(which.folder), table_name=which.table, schema=schema)


def sql(statements: str) -> Callable[[SchemaMigrator, pw.Database], None]:
    """Return the `up` of a migration that executes SQL; ``{schema}`` is the current schema."""

    def up(_migrator: SchemaMigrator, database: pw.Database) -> None:
        schema = database.execute_sql("select quote_ident(current_schema())").fetchone()[0]
        # psycopg2 would read a percent sign as a placeholder.
        database.execute_sql(statements.replace("{schema}", schema).replace("%", "%%"))

    return up
