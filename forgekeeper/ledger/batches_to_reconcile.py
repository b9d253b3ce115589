"""One look at all batches: which of them a scheduler has to reconcile.

The look is a hint.  It changes nothing, and the steps of `forgekeeper.ledger.reconcile` repeat its conditions.  It may
name a batch of which nothing is to be done, and it names every batch of which something is.
"""

from __future__ import annotations

from collections.abc import Collection

from forgekeeper.ledger.holds import BATCH_SHOWS_HOLDS
from forgekeeper.ledger.job_runs import CLOCK_TOLERANCE
from forgekeeper.ledger.reconcile import CLOSED_RUN_IS_AHEAD, LONGEST_RETRY, OPEN_RUN_IS_AHEAD, read_resend_delay
from forgekeeper.ledger.transitions import RUN_IS_LOST, RUN_IS_UNSENT
from forgekeeper.platform.database import database
from forgekeeper.platform.settings import Settings

REASONS_TO_RECONCILE = {
    "batch ahead": "batches.registered_at > clock_timestamp()",
    "hold ahead": "exists (select from holds where batch = wanted.name and since > clock_timestamp())",
    "hold not shown": f"batches.name is not null and not {BATCH_SHOWS_HOLDS}",
    # Each maximum is the end of an index.  Without them PostgreSQL would read the whole table.
    "closed run ahead": f"""
        case when (select max(finished_at) from job_runs) > clock.horizon
            or (select max(tick) from job_runs where batch = wanted.name) > clock.horizon
        then exists (
            select from job_runs where batch = wanted.name and {CLOSED_RUN_IS_AHEAD.format(horizon="clock.horizon")}
        ) end
    """,
    "open run ahead": f"exists (select from job_runs where batch = wanted.name and {OPEN_RUN_IS_AHEAD})",
    "lost run": f"exists (select from job_runs where batch = wanted.name and {RUN_IS_LOST})",
    "unsent run": f"exists (select from job_runs where batch = wanted.name and {RUN_IS_UNSENT})",
}
"""SQL by reason: whether a step has something to do, whatever the batch's schedule is."""
LOOK_AT_BATCHES = """
    select wanted.name, clock.now, coalesce(
            (select max(tick) from job_runs where batch = wanted.name and tick <= clock.horizon),
            batches.registered_at
        ),
        {reasons}
    from (select now, now + %(tolerance)s as horizon from (select clock_timestamp() as now) as read) as clock,
        unnest(%(names)s::text[]) as wanted (name) left join batches on batches.name = wanted.name
"""


def find_batches_to_reconcile(names: Collection[str], settings: Settings) -> set[str]:
    """Return the batches of *names* of which something is to be done now.

    It reads once, without locks, and writes nothing.  Raises `peewee.PeeweeException` if the server is down.
    """
    values = {
        "names": list(names),
        "tolerance": CLOCK_TOLERANCE,
        "longest_retry": LONGEST_RETRY,
        "dead_after": settings.dead_after,
        "again_after": read_resend_delay(settings),
    }
    statement = LOOK_AT_BATCHES.format(reasons=" or ".join(f"({one})" for one in REASONS_TO_RECONCILE.values()))
    found = set()
    for name, now, newest_tick, has_reason in database.execute_sql(statement, values).fetchall():
        schedule = settings.schedule_of(name)
        is_due = schedule is not None and (newest_tick is None or schedule.latest_until(now) > newest_tick)
        if has_reason or is_due:
            found.add(name)
    return found
