"""The audit's upkeep: partitions are made a year ahead, and whole months that are past are dropped."""

from __future__ import annotations

from datetime import datetime

import peewee as pw

from forgekeeper.database import database, sqlstate

# Who waits for a table lets everybody behind it wait, too: deletions, which write to the audit.
PATIENTLY = "set local lock_timeout = '1s'; "
LOCKED = "55P03"


class Busy(Exception):
    """Somebody has the audit locked."""


def make_partitions(until: datetime) -> None:
    """Make the months up to *until* that are not there yet; raise `Busy` when that would have to wait."""
    _call("select audit_partitions(%s)", until)


def drop_partitions(horizon: datetime) -> int:
    """Drop the months that had ended by *horizon*, return how many; raise `Busy` when that would have to wait."""
    return int(_call("select audit_drop(%s)", horizon) or 0)


def _call(statement: str, instant: datetime) -> int | None:
    try:
        with database.atomic():
            found: int | None = database.execute_sql(PATIENTLY + statement, (instant,)).fetchone()[0]
    except pw.OperationalError as error:
        if sqlstate(error) == LOCKED:
            raise Busy(str(error)) from error
        raise
    return found
