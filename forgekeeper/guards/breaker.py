"""The circuit breaker: it holds a batch whose run would delete far more than usual.

The hold lasts until a person releases the batch.  A run is held if it would delete more than a share of its table,
*and* more than ten times the largest of the last hundred runs, *and* more than a few records, unless a release admits
it.

After an outage many records are due that accumulated as usual.  The breaker allows for them by the time since the last
ordinary run and the usual rate of deletion: the busiest hour and day in the ledger.  The reason of the outage does not
matter, because no run was ordinary in that time: a pause, a stop, a hold, a flag, missing workers.
`docs/adr/0022-a-breaker-goes-by-rates.md` has the reasons.

A release is an amount.  It begins with the first run that starts after it; until then the children of earlier runs stay
held.  Its runs, and all children at work meanwhile, together delete no more than the amount.  The release ends when a
run begins after the amount is used up, or after an ordinary run: that run used the release or did not need it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import peewee as pw
import redis

from forgekeeper.api.batches import BatchSpec, FeatureFlag
from forgekeeper.ledger.holds import GUARD_HOLD_KINDS, Batch, BatchHeld, Hold
from forgekeeper.ledger.limits import USED_OF_RELEASE, DeletionLimits, RunTotal
from forgekeeper.platform.database import database
from forgekeeper.platform.database.survey import answer_within
from forgekeeper.platform.settings import Settings
from metrics.logs import clean_input

LARGEST_RUN_MULTIPLE = 10
"""A run that deletes more than this multiple of the largest earlier run is out of proportion."""
COMPARED_RUNS = 100
COUNT_TIME_LIMIT = timedelta(seconds=5)
"""Time limit of a count; a count that takes longer is treated as too large."""
MAX_COUNTED_TABLE_ROWS = 1_000_000
"""Maximum rows of a view that are counted."""
MAX_COUNT = 2**31 - 1
"""Maximum of any count."""
RATE_HOUR, RATE_DAY = timedelta(hours=1), timedelta(days=1)
OUTAGE_PAUSE_MULTIPLE = 3
"""A pause between two runs of more than this multiple of the usual pause is an outage."""

NEXT_RUN = 2**62
"""Number in place of a run that has not started yet."""

SELECT_LARGEST_RUN = """
    select coalesce(max(records), 0)::bigint from (
        select sum(records) as records from run_totals where batch = %(batch)s and run <> %(run)s and records > 0
        group by run order by run desc limit %(runs)s
    ) as runs
"""
# A run counts in whole for the hour and the day of its start.  Runs that are not ordinary say nothing about rates.
# The join uses the run's id alone.  With the batch, and statistics that do not know the batch yet, PostgreSQL would
# compare each total with each run.
SELECT_RATES = """
    with totals as (
        select run.started_at, sum(total.records) as records
        from run_totals as total join job_runs as run on run.id = total.run
        where total.batch = %(batch)s and total.records > 0 and run.ordinary
        group by run.id, run.started_at
    ), ordinary as (
        select started_at from job_runs where batch = %(batch)s and ordinary order by id desc limit %(runs)s
    )
    select
        coalesce((select max(records) from (
            select sum(records) as records from totals group by date_trunc('hour', started_at)) as hours), 0)::float,
        coalesce((select max(records) from (
            select sum(records) as records from totals group by date_trunc('day', started_at)) as days), 0)::float,
        coalesce((select max(started_at) - min(started_at) from totals), interval '0'),
        clock_timestamp() - (select max(started_at) from ordinary),
        (select percentile_cont(0.9) within group (order by gap)
            from (select started_at - lag(started_at) over (order by started_at) as gap from ordinary) as gaps)
"""
UPSERT_RELEASE = """
    insert into batches (name, released_at, released_reason, released_by, released_expect)
    values (%(batch)s, clock_timestamp(), %(reason)s, %(by)s, %(expect)s)
    on conflict (name) do update set released_at = excluded.released_at, released_reason = excluded.released_reason,
        released_by = excluded.released_by, released_expect = excluded.released_expect, released_run = null
"""
SELECT_IS_RELEASED = f"""
    select released_run is null or released_run = %(run)s or not (
        coalesce(released_expect <= {USED_OF_RELEASE}, false)
        or exists (
            select from job_runs where batch = name and id >= released_run and id < %(run)s
                and state = 'succeeded' and ordinary is not false
        )
    )
    from batches where name = %(batch)s and released_at is not null
"""


class Verdict(NamedTuple):
    """The circuit breaker's judgement: whether the run is *ordinary*, and why it would be held.

    Both are None if the batch does not declare an affected share, or if the settings switch the breaker off.
    """

    ordinary: bool | None = None
    sentence: str | None = None


def check_run(
    batch: BatchSpec, settings: Settings, run: int, instant: datetime, *, released: bool = False
) -> bool | None:
    """Return whether the run is ordinary; raise `BatchHeld` if it must not begin.

    A *released* run is not held, nor a run whose feature flag is off.
    """
    verdict = judge_run(batch, settings, run, instant, released=released)
    if verdict.sentence is None:
        return verdict.ordinary
    if released or (batch.flag is not None and not FeatureFlag.is_on(batch.flag)):
        return False
    preview, release = f"forgekeeper run {batch.name} --dry-run", f"forgekeeper release {batch.name} --reason REASON"
    raise BatchHeld("breaker", f"{verdict.sentence}: check `{preview}`, then `{release}`")


def judge_run(batch: BatchSpec, settings: Settings, run: int, instant: datetime, *, released: bool) -> Verdict:
    """Compare a run's deletions with its table and with the deletions of earlier runs.

    Today's limits, and the amount of a release if the run is *released*, bound its deletions.
    """
    if batch.stake is None or settings.breaker_share >= 1:
        return Verdict()
    stake, least = batch.stake(instant), settings.breaker_least
    # Most runs have little to do, so their check has to be cheap: a count up to this limit is fast.
    if stake.due(least + 1) <= least:
        return Verdict(ordinary=True)
    values = {"batch": batch.name, "run": run, "runs": COMPARED_RUNS}
    largest = find_largest_run(batch.name, run)
    most = max(least, LARGEST_RUN_MULTIPLE * largest)
    due = _in_time(lambda: stake.due(most + 1))
    if due is not None and due <= most:
        return Verdict(ordinary=True)
    size = _in_time(lambda: stake.total(MAX_COUNTED_TABLE_ROWS))
    bound = math.floor(
        max(most, settings.breaker_share * (size or 0), LARGEST_RUN_MULTIPLE * (largest + _estimate_growth(values)))
    )
    if due is not None:
        due = _in_time(lambda: stake.due(bound + 1))
    used = RunTotal.read_usage(batch.name, run)
    left = DeletionLimits(*settings.deletion_limits(batch.name)).remaining_records(
        used if released else used._replace(released=None)
    )
    room = None if left.reason is None else left.amount
    would = room if due is None else due if room is None else min(due, room)
    if would is not None and would <= bound:
        return Verdict(ordinary=False)
    whole = would if would is None or size is None else _in_time(lambda: stake.due(size)) or would
    return Verdict(ordinary=False, sentence=_describe_excess(whole if room is None else would, size, largest))


def find_largest_run(batch: str, run: int = NEXT_RUN) -> int:
    """Return the deletions of the largest of the last hundred runs, without *run*."""
    (largest,) = database.execute_sql(
        SELECT_LARGEST_RUN, {"batch": batch, "run": run, "runs": COMPARED_RUNS}
    ).fetchone()
    return int(largest)


def count_due(batch: BatchSpec, instant: datetime) -> int | None:
    """Count the records that a run without limits would delete.

    Returns None if that takes too long or is not possible.
    """
    try:
        stake = batch.stake(instant) if batch.stake else None
        return _in_time(lambda: stake.due(MAX_COUNT)) if stake else None
    except (redis.RedisError, pw.ProgrammingError):
        return None


def release_batch(batch: str, *, reason: str, by: str, expect: int) -> list[Hold]:
    """Lift the guards' holds of the batch and allow *expect* deletions; return the lifted holds.

    With an *expect* of 0 the release has no amount and ends at once: later runs are checked as usual.  If no guard
    holds the batch, nothing is released: nobody has reviewed a hold that is added a moment later.
    """
    with database.atomic():
        lifted = Hold.lift(batch, GUARD_HOLD_KINDS)
        if lifted and expect == 0:
            end_release(batch)
        elif lifted:
            facts = {"reason": clean_input(reason), "by": clean_input(by), "expect": expect}
            database.execute_sql(UPSERT_RELEASE, {"batch": batch} | facts)
    return lifted


def begin_release(batch: str, run: int) -> None:
    """Begin the release with this run if it has not begun yet."""
    new = (Batch.released_at.is_null(False), Batch.released_run.is_null())
    Batch.update(released_run=run).where(Batch.name == batch, *new).execute()


def is_released(batch: str, run: int = NEXT_RUN) -> bool:
    """Return whether a release admits this run, the last to begin, or else the next run."""
    row = database.execute_sql(SELECT_IS_RELEASED, {"batch": batch, "run": run}).fetchone()
    return row is not None and row[0]


def end_release(batch: str) -> None:
    """End the release; its author and reason stay readable."""
    Batch.update(released_at=None, released_run=None).where(Batch.name == batch).execute()


def _estimate_growth(values: dict[str, Any]) -> float:
    """Estimate by the ledger's rates how much has accumulated since the last ordinary run."""
    an_hour, a_day, known, since, gap = database.execute_sql(SELECT_RATES, values).fetchone()
    if since is None:
        return 0.0
    # An outage may contain the whole busiest hour and day; without an outage not even a part of them counts extra.
    whole = int(gap is not None and since > OUTAGE_PAUSE_MULTIPLE * gap)
    grown: float = an_hour * (since / RATE_HOUR + whole)
    return min(grown, a_day * (since / RATE_DAY + 1)) if known >= 2 * RATE_DAY else grown


def _in_time(count: Callable[[], int]) -> int | None:
    """Return the result of *count*; None if it takes too long."""
    return answer_within(time.monotonic() + COUNT_TIME_LIMIT.total_seconds(), count)


def _describe_excess(would: int | None, size: int | None, largest: int) -> str:
    seconds = f"{COUNT_TIME_LIMIT.total_seconds():g} s"
    much = f"an unknown number (more than can be counted in {seconds})" if would is None else f"{would:,}"
    of = f"a total that cannot be counted in {seconds}" if size is None else f"about {max(size, would or 0):,} records"
    share = f" ({would / max(size, would):.0%})" if would and size else ""
    before = (
        f"the largest of the last {COMPARED_RUNS} runs deleted {largest:,}"
        if largest
        else "no earlier run has deleted any"
    )
    return f"a run would delete {much} of {of}{share}, and {before}"
