"""How long a batch will need: by the pace of its last runs, and by the pace that it is allowed."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any, NamedTuple

from forgekeeper.batches import BatchSpec
from forgekeeper.database import database
from forgekeeper.settings import Settings

RUNS = 100
"""Of so many of its last runs those count that have done something."""
FAR = 10
"""Of more than so many times what any of them has done, they say only how long it takes at most."""
UNKNOWN = "unknown, it has not run yet"

LAST_RUNS = """
    select result, extract(epoch from finished_at - started_at)::float from job_runs
    where batch = %(batch)s and state = 'succeeded' and started_at is not null and finished_at > started_at
    order by id desc limit %(runs)s
"""
# It is not recorded how long the children of a run have worked: until their time was up, or until the next began.
LAST_WITH_CHILDREN = """
    with last as (
        select id, started_at, lead(started_at, 1, clock_timestamp()) over (order by id) as next from (
            select id, started_at from job_runs where batch = %(batch)s and started_at is not null
            order by id desc limit %(runs)s
        ) as runs
    ), totals as (
        select run, sum(records)::bigint as records from run_totals
        where batch = %(batch)s and run = any(array(select id from last)) group by run
    )
    select coalesce(records, 0), least(greatest(extract(epoch from next - started_at), 0.001), %(budget)s)::float
    from last left join totals on run = id
"""


class Pace(NamedTuple):
    """How long it will take: *seconds* of work in so many *runs*, and until the last of them has ended.

    *per_second* is by its last runs, *allowed* by its setting.  Without a pace *unknown* says why.  *at_most* says that
    its last runs had so little to do that they say only how long it takes at most.
    """

    per_second: float | None = None
    allowed: float | None = None
    seconds: float | None = None
    runs: int | None = None
    lasts: float | None = None
    unknown: str | None = None
    at_most: bool = False


class Measured(NamedTuple):
    """How many records a second a batch has worked on, in runs that had up to so many."""

    per_second: float
    largest: int


def pace(batch: BatchSpec, records: int, settings: Settings) -> Pace:
    """Say how long the batch will take for so many *records*."""
    budget = max(one.budget for one in (batch, *batch.children)).total_seconds()
    measured, allowed = measured_pace(batch, budget), settings.pace(batch.name)
    by = measured and measured.per_second
    known = [rate for rate in (by, allowed) if rate]
    if not known:
        return Pace(unknown=UNKNOWN)
    seconds = records / min(known)
    at_most = measured is not None and by == min(known) and records > FAR * measured.largest
    per_run, *_ = settings.limits(batch.name)
    runs = max(1, math.ceil(seconds / budget), math.ceil(records / per_run) if per_run else 0) if records else 0
    return Pace(by, allowed, seconds, runs, _lasts(batch, seconds, runs, budget, settings), at_most=at_most)


def measured_pace(batch: BatchSpec, budget: float) -> Measured | None:
    """Return how many records a second those of its last runs have worked on that had much to do; None where none has.

    What a run takes that has three records is what a run takes that has none: it says nothing of thousands.
    """
    values = {"batch": batch.name, "runs": RUNS, "budget": budget}
    rows = database.execute_sql(LAST_WITH_CHILDREN if batch.children else LAST_RUNS, values).fetchall()
    counted = [(found if isinstance(found, int) else _processed(batch, found), lasted) for found, lasted in rows]
    largest = max((records for records, _lasted in counted), default=0)
    if not largest:
        return None
    working = [(records, lasted) for records, lasted in counted if records >= largest / 2]
    done, seconds = (sum(each) for each in zip(*working, strict=True))
    return Measured(done / seconds, largest)


def _processed(batch: BatchSpec, result: Any) -> int:
    """Add up what a run has come to."""
    fields = [name for record in batch.records for name in record.processed]
    numbers = [result.get(name) for name in fields] if isinstance(result, dict) else []
    return sum(number for number in numbers if isinstance(number, int))


def _lasts(batch: BatchSpec, seconds: float, runs: int, budget: float, settings: Settings) -> float | None:
    """Return how long it is to the end of the last run; None of a batch that is on no timetable."""
    if runs <= 1:
        return seconds
    schedule = settings.cron(batch.name)
    if schedule is None:
        return None
    each = min(budget, seconds / runs)
    between = max(timedelta(seconds=each), schedule.period).total_seconds()
    return (runs - 1) * between + max(0.0, seconds - (runs - 1) * each)
