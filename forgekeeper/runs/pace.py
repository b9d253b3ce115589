"""How long a batch will need: by the pace of its last runs, and by the pace that it is allowed."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import NamedTuple

from forgekeeper.batches import BatchSpec
from forgekeeper.database import database
from forgekeeper.settings import Settings

RUNS = 100
"""Of so many of its last runs those count that have done something."""
UNKNOWN = "unknown, it has not run yet"
OF_CHILDREN = "unknown: no run of it says what its children have done, and it has no pace"

LAST_RUNS = """
    select result, extract(epoch from finished_at - started_at)::float from job_runs
    where batch = %(batch)s and state = 'succeeded' and started_at is not null and finished_at > started_at
    order by id desc limit %(runs)s
"""


class Pace(NamedTuple):
    """How long it will take: *seconds* of work in so many *runs*, and until the last of them has ended.

    *per_second* is by its last runs, *allowed* by its setting.  Without a pace *unknown* says why.
    """

    per_second: float | None = None
    allowed: float | None = None
    seconds: float | None = None
    runs: int | None = None
    lasts: float | None = None
    unknown: str | None = None


def pace(batch: BatchSpec, records: int, settings: Settings) -> Pace:
    """Say how long the batch will take for so many *records*."""
    measured, ran = measured_pace(batch)
    allowed = settings.pace(batch.name)
    known = [rate for rate in (measured, allowed) if rate]
    if not known:
        return Pace(allowed=allowed, unknown=OF_CHILDREN if ran and batch.children else UNKNOWN)
    seconds = records / min(known)
    budget = max(one.budget for one in (batch, *batch.children)).total_seconds()
    runs = max(1, math.ceil(seconds / budget)) if records else 0
    return Pace(measured, allowed, seconds, runs, _lasts(batch, seconds, runs, budget, settings))


def measured_pace(batch: BatchSpec) -> tuple[float | None, bool]:
    """Return how many records a second its last runs have worked on, None where none has; and whether any ran."""
    fields = [name for record in batch.records for name in record.processed]
    done, seconds, ran = 0, 0.0, False
    for result, lasted in database.execute_sql(LAST_RUNS, {"batch": batch.name, "runs": RUNS}).fetchall():
        numbers = [result.get(name) for name in fields] if isinstance(result, dict) else []
        records = sum(number for number in numbers if isinstance(number, int))
        ran = True
        if records > 0:
            done, seconds = done + records, seconds + lasted
    return (done / seconds if done else None), ran


def _lasts(batch: BatchSpec, seconds: float, runs: int, budget: float, settings: Settings) -> float | None:
    """Return how long it is to the end of the last run; None where that would be ever, as it is on no timetable."""
    if runs <= 1:
        return seconds
    schedule = settings.cron(batch.name)
    if schedule is None:
        return None
    between = max(timedelta(seconds=budget), schedule.period).total_seconds()
    return (runs - 1) * between + seconds - (runs - 1) * budget
