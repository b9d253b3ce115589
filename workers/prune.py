"""Remove forgekeeper's own old records, and the rows that batches are done with.

Runs hourly, in chunks of a thousand.  The audit records each removal.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from forgekeeper import Housekeeping, batch

MAX_RUNTIME = timedelta(minutes=5)


@batch(cron="0 * * * *", budget=MAX_RUNTIME, time_limit=timedelta(minutes=7))
def prune(now: datetime) -> Housekeeping:
    """Remove forgekeeper's own old records."""
    return Housekeeping(
        runs=timedelta(days=30),
        processes=timedelta(days=1),
        # A record in quarantine is tried again after a day at most, or waits for a person.
        quarantine=timedelta(days=7),
        # Until then people can ask why something was kept.
        exclusions=timedelta(days=30),
        # A Redis backup must not be older: the uploads in it could not be checked.
        settled_uploads=timedelta(days=30),
        run_totals=timedelta(days=60),
        notices=timedelta(days=30),
        audit_ahead=timedelta(days=365),
    )
