"""The clocks of PostgreSQL, Redis and this machine, compared; and what was written while PostgreSQL's was ahead.

What is due is decided by PostgreSQL's clock in some batches and by Redis's in others; one that is
a day ahead deletes what should live.  A question takes time: a clock is taken to have answered in
the middle of it, and half of it is doubt, which never counts against the clock.  What was written
while the database's clock was ahead is set aside and reported, so that it holds nothing back.
"""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from itertools import combinations
from typing import NamedTuple

import peewee as pw
import redis

from forgekeeper.connections import client
from forgekeeper.database import database, now
from forgekeeper.runs.blocked import Blocked
from forgekeeper.runs.holds import Batch, Hold
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.plan import CLOCK_TOLERANCE
from forgekeeper.runs.retry import LONGEST_RETRY
from forgekeeper.settings import Settings

NAMES = {"postgresql": "PostgreSQL's clock", "redis": "Redis's clock", "host": "this machine's clock"}


REMEMBERED = timedelta(hours=1)
"""For so long a tick that was set aside is reported."""
# What has a time that has not come was written while the clock was ahead.  A closed row gives its tick back,
# for the real one to run, and remembers it in its result; it ended before now, and lasted as long as it did.
# Compared with a volatile function, or with what the planner does not know, no index would be used: so the rows are
# looked for by a horizon from outside, and judged by the clock, which a process that was delayed meanwhile cannot know.
SET_ASIDE = """
    update job_runs set
        result = case when tick > clock_timestamp() + %(tolerance)s
            then coalesce(result, '{}') || jsonb_build_object('set_aside', tick) else result end,
        tick = case when tick <= clock_timestamp() + %(tolerance)s then tick end,
        claimed_at = least(claimed_at, clock_timestamp()), enqueued_at = least(enqueued_at, clock_timestamp()),
        started_at = case when started_at > clock_timestamp()
            then clock_timestamp() - greatest(finished_at - started_at, interval '0') else started_at end,
        alive_at = least(alive_at, clock_timestamp()), finished_at = clock_timestamp()
    where batch = %(batch)s and state not in ('claimed', 'enqueued', 'started')
      and (tick > %(horizon)s or finished_at > %(horizon)s)
      and greatest(tick, finished_at) > clock_timestamp() + %(tolerance)s
    returning (result ->> 'set_aside')::timestamptz
"""
# The open row keeps its tick while it is open: it is at work.  It waits no longer than a right clock allows.
SET_RIGHT = """
    update job_runs set
        claimed_at = least(claimed_at, clock_timestamp()),
        enqueued_at = case when enqueued_at is not null then least(enqueued_at, clock_timestamp()) end,
        started_at = least(started_at, clock_timestamp()), alive_at = least(alive_at, clock_timestamp()),
        retry_at = case when retry_at <= clock_timestamp() + %(longest_retry)s then retry_at
            when retry_at is not null then clock_timestamp() end
    where batch = %(batch)s and state in ('claimed', 'enqueued', 'started')
      and (greatest(claimed_at, enqueued_at, started_at, alive_at) > clock_timestamp() + %(tolerance)s
        or retry_at > clock_timestamp() + %(longest_retry)s)
"""
AHEAD = """
    select count(tick) from (
        select tick from job_runs
        where batch = %(batch)s and tick > (select clock_timestamp() + %(tolerance)s)
        union all
        select (result ->> 'set_aside')::timestamptz from job_runs
        where batch = %(batch)s and tick is null and result ? 'set_aside'
          and finished_at > clock_timestamp() - %(remembered)s
    ) as ahead
"""


class Difference(NamedTuple):
    """How far *clock* is ahead of *reference*, in seconds, and how wrong that may be."""

    clock: str
    reference: str
    seconds: float
    doubt: float

    def exceeds(self, tolerance: timedelta) -> bool:
        """Say whether the clocks are further apart than that beyond doubt."""
        return abs(self.seconds) - self.doubt > tolerance.total_seconds()

    def sentence(self) -> str:
        """Say it to people."""
        way = f"{abs(self.seconds):.0f} s {'ahead of' if self.seconds > 0 else 'behind'}"
        return f"{NAMES[self.clock]} is {way} {NAMES[self.reference]}; set right the one that is wrong"


def differences(*clocks: str) -> list[Difference]:
    """Read these clocks, or all, within a moment, and compare each with each; raises what servers raise."""
    read = {name: _read(name) for name in clocks or NAMES}
    return [
        Difference(one, other, read[one][0] - read[other][0], read[one][1] + read[other][1])
        for one, other in combinations(read, 2)
    ]


def require(settings: Settings) -> None:
    """Raise `Blocked` where PostgreSQL's and Redis's clocks are too far apart to know what is due.

    A Redis that is away has no clock to go by: whatever needs it fails of itself.
    """
    try:
        (found,) = differences("postgresql", "redis")
    except redis.RedisError:
        return
    if found.exceeds(settings.clock_tolerance):
        allowed = f"FORGEKEEPER_CLOCK_TOLERANCE allows {settings.clock_tolerance.total_seconds():g} s"
        raise Blocked("clocks", f"{found.sentence()} ({allowed})")


def _read(clock: str) -> tuple[float, float]:
    """Return how far the clock is from the monotonic one, and how wrong that may be, in seconds."""
    began = time.monotonic()
    if clock == "postgresql":
        said = now().timestamp()
    elif clock == "redis":
        seconds, microseconds = client.time()
        said = seconds + microseconds / 1e6
    else:
        said = time.time()
    ended = time.monotonic()
    return said - (began + ended) / 2, (ended - began) / 2


def ahead(batch: str) -> int:
    """Count the ticks whose time has not come, and those that were set aside for it within the last hour."""
    values = {"batch": batch, "tolerance": CLOCK_TOLERANCE, "remembered": REMEMBERED}
    count: int = database.execute_sql(AHEAD, values).fetchone()[0]
    return count


def set_aside(batch: str, tick: datetime) -> JobRun | None:
    """Return the newest row from which the tick was taken, because its time had not come."""
    taken = pw.SQL("(result ->> 'set_aside')::timestamptz = %s", (tick,))
    row: JobRun | None = JobRun.of(batch).where(JobRun.tick.is_null(), taken).first()
    return row


def set_right(batch: str) -> list[datetime]:
    """Correct what was written while the clock was ahead; return the ticks that were set aside.

    Idempotent; what is right stays as it is.
    """
    moment = pw.fn.clock_timestamp()
    Batch.update(registered_at=moment).where(Batch.name == batch, Batch.registered_at > moment).execute()
    Hold.update(since=moment).where(Hold.batch == batch, Hold.since > moment).execute()
    Hold.show(batch)
    values = {"batch": batch, "tolerance": CLOCK_TOLERANCE, "longest_retry": LONGEST_RETRY + CLOCK_TOLERANCE}
    rows = database.execute_sql(SET_ASIDE, values | {"horizon": now() + CLOCK_TOLERANCE}).fetchall()
    database.execute_sql(SET_RIGHT, values)
    return [tick for (tick,) in rows if tick is not None]
