"""The example forge's tables: what a real forge owns, and forgekeeper's own migrations never touch."""

from pathlib import Path

import peewee as pw

from forgekeeper import migrations

TABLES = migrations.Set(Path(__file__).parent, "example_migrations")


def make_tables(database: pw.Database) -> None:
    """Make the tables that are not there yet; raise `TableExists` where one is a forge's own."""
    migrations.migrate(database, TABLES)
