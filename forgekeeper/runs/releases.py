"""Releases: how much of a batch that a brake holds may go, because a person has looked at it.

A release is an amount.  It begins with the first run that starts after it, and until then the children of earlier runs
stay held.  The runs that it lets go, and all children at work meanwhile, delete no more than the amount together.  It
ends where a run begins after that is used up, or after a run that was ordinary: which it was used by, or needed it not.
"""

from __future__ import annotations

from forgekeeper.database import database
from forgekeeper.runs.holds import BRAKES, Hold
from metrics.logs import one_line

NEXT = 2**62
"""Stands for the number of a run that has not started yet."""

GIVE = """
    insert into batches (name, released_at, released_reason, released_by, released_expect)
    values (%(batch)s, clock_timestamp(), %(reason)s, %(by)s, %(expect)s)
    on conflict (name) do update set released_at = excluded.released_at, released_reason = excluded.released_reason,
        released_by = excluded.released_by, released_expect = excluded.released_expect, released_run = null
"""
TAKE = """
    update batches set released_run = %(run)s
    where name = %(batch)s and released_at is not null and released_run is null
"""
USED = """coalesce((
    select sum(records + reserved) from run_totals where batch = name and run >= coalesce(released_run, %(run)s)
), 0)"""
"""How much has gone by the release of a row of `batches`, or may go yet by what is reserved."""
STANDS = f"""
    select released_run is null or released_run = %(run)s or not (
        coalesce(released_expect <= {USED}, false)
        or exists (
            select from job_runs where batch = name and id >= released_run and id < %(run)s
                and state = 'succeeded' and ordinary is not false
        )
    )
    from batches where name = %(batch)s and released_at is not null
"""
END = "update batches set released_at = null, released_run = null where name = %(batch)s"


def give(batch: str, *, reason: str, by: str, expect: int | None) -> list[Hold]:
    """End what brakes hold the batch for, and let *expect* records go, or all; return what has ended.

    Where no brake holds it nothing is released: a brake that holds it a moment later has not been looked at.
    """
    with database.atomic():
        lifted = Hold.lift(batch, BRAKES)
        if lifted:
            database.execute_sql(
                GIVE, {"batch": batch, "reason": one_line(reason), "by": one_line(by), "expect": expect}
            )
    return lifted


def take(batch: str, run: int) -> None:
    """Let the release that no run has had yet begin with this one."""
    database.execute_sql(TAKE, {"batch": batch, "run": run})


def stands(batch: str, run: int = NEXT) -> bool:
    """Say whether a release lets go what this run does, which has begun last, or else the next one."""
    row = database.execute_sql(STANDS, {"batch": batch, "run": run}).fetchone()
    return row is not None and row[0]


def end(batch: str) -> None:
    """End the release; who gave it, and why, stays to be read."""
    database.execute_sql(END, {"batch": batch})
