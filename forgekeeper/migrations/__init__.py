"""Bring a database's schema up to date, one process at a time.

There are two sets: ``forgekeeper`` for the tables that are ours, and ``example`` for
those that the forge owns.  Only `demo`, `seed` and the tests apply the second; an
operator's own tables are never touched.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import peewee as pw
from playhouse.migrations import Runner

Set = Literal["forgekeeper", "example"]
DUPLICATE_TABLE = "42P07"
LOCK = 0x666F7267656B
"""The advisory lock of all migrations: the letters ``forgek``."""


class TableExists(Exception):
    """A table that a migration creates is there already; nothing was changed."""


def newest(which: Set = "forgekeeper") -> str:
    """Name the newest migration that this version knows."""
    return max(file.stem for file in (Path(__file__).parent / which).glob("[0-9]*.py"))


def pending(database: pw.Database, which: Set = "forgekeeper") -> list[str]:
    """Name the migrations that have not been applied, in their order."""
    return [migration.name for migration in _runner(database, which).status() if not migration.applied]


def migrate(database: pw.Database, which: Set = "forgekeeper") -> list[str]:
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
    return Runner(database, str(Path(__file__).parent / which), table_name=f"{which}_migrations")
