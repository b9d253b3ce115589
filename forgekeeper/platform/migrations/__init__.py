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

from forgekeeper.platform.database.sessions import DEFAULT_SCHEMAS, Database

DUPLICATE_TABLE = "42P07"
MIGRATIONS_LOCK = 0x666F7267656B
"""The advisory lock of all migrations: the letters ``forgek``."""


# Every schema that has the table: the right schema first, then schemas that sessions search.
SELECT_SCHEMAS_OF_TABLE = """
    select nspname, pg_table_is_visible(c.oid) from pg_class as c join pg_namespace as n on n.oid = relnamespace
    where relname = %(table)s and relkind in ('r', 'p')
    order by nspname = %(schema)s desc, 2 desc
"""


class MigrationSet(NamedTuple):
    """A set of migrations: their folder, the table of applied migrations, and the owner."""

    folder: Path
    table: str
    is_ours: bool = True

    def schema_of(self, database: Database) -> str:
        """Return the schema of the set's tables."""
        return database.schema if self.is_ours else database.forge_schema


OWN_MIGRATIONS = MigrationSet(Path(__file__).parent / "forgekeeper", "forgekeeper_migrations")


class TableExists(Exception):
    """A table that a migration creates exists already; nothing was changed."""


class TablesElsewhere(Exception):
    """Our tables are in a schema that no session searches; nothing was changed."""


def find_newest() -> str:
    """Return the name of the newest migration that this version knows."""
    return max(file.stem for file in OWN_MIGRATIONS.folder.glob("[0-9]*.py"))


def list_pending(database: Database, which: MigrationSet = OWN_MIGRATIONS) -> list[str]:
    """Return the names of the migrations that have not been applied, in order."""
    runner = _create_runner(database, which, schema=_find_schema(database, which))
    return [migration.name for migration in runner.status() if not migration.applied]


def oldest_survivor(database: Database, which: MigrationSet = OWN_MIGRATIONS) -> str | None:
    """Return the migration that a process must know to work after all pending migrations.

    Returns None if older processes of all versions can work.
    """
    runner = _create_runner(database, which, schema=_find_schema(database, which))
    loaded = [migration.load() for migration in runner.status() if migration.path and not migration.applied]
    return max((one.OLDEST_SURVIVOR for one in loaded if hasattr(one, "OLDEST_SURVIVOR")), default=None)


def apply_pending(database: Database, which: MigrationSet = OWN_MIGRATIONS) -> list[str]:
    """Apply all pending migrations in one transaction; return their names.

    A second process waits for the first and then finds nothing to do.  A missing schema is created.  Raises
    `TableExists` if a table to create exists already, and `TablesElsewhere`.
    """
    try:
        with database.atomic():
            # No limit for the wait for another process: a session's limits are meant for rows.
            database.execute_sql("set local lock_timeout = 0")
            database.execute_sql("set local statement_timeout = 0")
            database.execute_sql("select pg_advisory_xact_lock(%s)", (MIGRATIONS_LOCK,))
            _require_none_elsewhere(database, which)
            place = _find_schema(database, which)
            make_schema(database, place)
            _put_schema_first(database, place)
            applied: list[str] = _create_runner(database, which).up()
            _put_schema_first(database, database.schema)
    except pw.ProgrammingError as error:
        if getattr(getattr(error, "orig", None), "pgcode", None) != DUPLICATE_TABLE:
            raise
        raise TableExists(str(error).splitlines()[0]) from None
    return applied


def _find_schema(database: Database, which: MigrationSet) -> str:
    """Return the schema with applied migrations if sessions search it, else the set's schema."""
    schema = which.schema_of(database)
    place, visible = _find_used_schema(database, which) or (schema, True)
    return place if visible else schema


def _require_none_elsewhere(database: Database, which: MigrationSet) -> None:
    """Raise `TablesElsewhere` if our tables are in an unexpected schema, before others are created."""
    place, visible = _find_used_schema(database, which) or (None, True)
    schema = which.schema_of(database)
    if not visible and place != schema == DEFAULT_SCHEMAS[0]:
        raise TablesElsewhere(f"forgekeeper's tables are in schema {place}: set FORGEKEEPER_OWN_SCHEMA to {place}")


def _find_used_schema(database: Database, which: MigrationSet) -> tuple[str, bool] | None:
    values = {"table": which.table, "schema": which.schema_of(database)}
    found: tuple[str, bool] | None = database.execute_sql(SELECT_SCHEMAS_OF_TABLE, values).fetchone()
    return found


def make_schema(database: Database, schema: str) -> None:
    """Create a missing schema.

    It is checked first: ``create schema`` needs a privilege that the schema's owner may lack, even if the schema
    exists.
    """
    if database.execute_sql("select to_regnamespace(%s) is null", (schema,)).fetchone()[0]:
        database.execute_sql(f"create schema {schema}")


def _put_schema_first(database: Database, schema: str) -> None:
    """Put *schema* first in the search path: this transaction creates its tables there."""
    rest = f"{database.schema}, {database.forge_schema}"
    database.execute_sql(f"set local search_path = {schema}, {rest}, pg_catalog")


def _create_runner(database: pw.Database, which: MigrationSet, schema: str | None = None) -> Runner:
    return Runner(database, str(which.folder), table_name=which.table, schema=schema)


def sql(statements: str) -> Callable[[SchemaMigrator, pw.Database], None]:
    """Return the `up` of a migration that executes SQL; ``{schema}`` is the current schema."""

    def up(_migrator: SchemaMigrator, database: pw.Database) -> None:
        schema = database.execute_sql("select quote_ident(current_schema())").fetchone()[0]
        # psycopg2 would read a percent sign as a placeholder.
        database.execute_sql(statements.replace("{schema}", schema).replace("%", "%%"))

    return up
