"""The example forge's tables; forgekeeper's own migrations never change a forge's tables."""

from pathlib import Path

from forgekeeper.platform import migrations
from forgekeeper.platform.database.sessions import Database

EXAMPLE_MIGRATIONS = migrations.MigrationSet(Path(__file__).parent, "example_migrations", is_ours=False)


def make_tables(database: Database) -> None:
    """Create missing tables; raise `TableExists` if a table is a forge's own."""
    migrations.apply_pending(database, EXAMPLE_MIGRATIONS)
