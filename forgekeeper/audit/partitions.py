"""Upkeep of the audit: create partitions a year ahead, drop months after the retention.

Only whole months are dropped.  The owner of the tables has recorded the retention time; a worker's own setting can only
be longer.
"""

from __future__ import annotations

from datetime import datetime

import peewee as pw
import structlog

from forgekeeper.platform.database import database, sqlstate
from forgekeeper.platform.database.sessions import LOCK_NOT_AVAILABLE
from metrics.logs import describe_error

# A process that waits for a table blocks all later ones: deletions, which write to the audit.
SET_LOCK_TIMEOUT = "set local lock_timeout = '1s'; "
# The same default as in the function of migration 0015.
SELECT_RETENTION_DAYS = "select coalesce((select audit_keep from installation), 400)"

log = structlog.get_logger(__name__)


def maintain_partitions(*, until: datetime, horizon: datetime) -> int:
    """Create months up to *until*, and drop months that had ended by *horizon*.

    Creates at most a year ahead, and drops at most a year's months.  Returns the number of dropped months.  Waits at
    most a second for a lock; months that were created by then stay.
    """
    try:
        for statement, instant in (("select audit_partitions(%s)", until), ("select audit_drop(%s)", horizon)):
            with database.atomic():
                (dropped,) = database.execute_sql(SET_LOCK_TIMEOUT + statement, (instant,)).fetchone()
    except pw.OperationalError as error:
        if sqlstate(error) != LOCK_NOT_AVAILABLE:
            raise
        log.warning("audit partitions locked, maintained again in an hour", error=describe_error(error))
        return 0
    return dropped or 0


def read_retention_days() -> int:
    """Return for how many days the installation keeps the audit.

    Ignores this process's setting.
    """
    return int(database.execute_sql(SELECT_RETENTION_DAYS).fetchone()[0])


def store_retention_days(days: int) -> int:
    """Record for how many days the audit is kept, and return the former number.

    Needs the rights of the owner of the tables.
    """
    before = read_retention_days()
    if before != days:
        database.execute_sql("update installation set audit_keep = %s", (days,))
    return before
