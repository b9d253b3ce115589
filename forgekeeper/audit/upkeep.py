"""The audit's upkeep: partitions are made a year ahead, and whole months dropped that the installation keeps no more.

How long it keeps them the owner of the tables has recorded; a worker's own setting may only be longer.
"""

from __future__ import annotations

from datetime import datetime

import peewee as pw
import structlog

from forgekeeper.platform.database import database, sqlstate
from forgekeeper.platform.database.sessions import LOCK_NOT_AVAILABLE
from metrics.logs import describe

# Who waits for a table lets everybody behind it wait, too: deletions, which write to the audit.
PATIENTLY = "set local lock_timeout = '1s'; "
# As in the function of migration 0015.
KEPT = "select coalesce((select audit_keep from installation), 400)"

log = structlog.get_logger(__name__)


def keep_up(*, until: datetime, horizon: datetime) -> int:
    """Make the months up to *until*, a year ahead at most, and drop a year's at most that had ended by *horizon*.

    Returns how many were dropped.  It waits for nobody who has the audit locked: what was made by then stays.
    """
    try:
        for statement, instant in (("select audit_partitions(%s)", until), ("select audit_drop(%s)", horizon)):
            with database.atomic():
                (dropped,) = database.execute_sql(PATIENTLY + statement, (instant,)).fetchone()
    except pw.OperationalError as error:
        if sqlstate(error) != LOCK_NOT_AVAILABLE:
            raise
        log.warning("audit not kept up, it is locked; tried again in an hour", error=describe(error))
        return 0
    return dropped or 0


def kept() -> int:
    """Return how many days the installation keeps the audit, whatever this process's setting says."""
    return int(database.execute_sql(KEPT).fetchone()[0])


def keep(days: int) -> int:
    """Record as the owner of the tables how long the audit is kept; return what was recorded before."""
    before = kept()
    if before != days:
        database.execute_sql("update installation set audit_keep = %s", (days,))
    return before
