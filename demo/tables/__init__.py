"""The example forge's tables: what a real forge owns, and forgekeeper's own migrations never touch."""

from pathlib import Path

from forgekeeper.platform import migrations
from forgekeeper.platform.database.sessions import Database

TABLES = migrations.Set(Path(__file__).parent, "example_migrations", ours=False)


def make_tables(database: Database) -> None:
    """Make the tables that are not there yet; raise `TableExists` where one is a forge's own."""
    migrations.migrate(database, TABLES)
