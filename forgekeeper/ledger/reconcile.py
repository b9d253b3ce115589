"""Reconcile a batch: repair the traces of a crash, a lost message or an emptied Redis.

Rows and the database's clock decide which ticks are due, who claims them, and how runs ended.  So any process may
reconcile at any time, any number of times, together with others.  Times that were written while that clock was ahead
are set aside and reported, so that they hold nothing back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Literal

import peewee as pw
import redis
import structlog

from forgekeeper.ledger.holds import Batch, Hold
from forgekeeper.ledger.job_runs import CLOCK_TOLERANCE, JobRun
from forgekeeper.ledger.retry_delays import MAX_RETRY_DELAY
from forgekeeper.platform.database import database, now
from forgekeeper.platform.failpoints import failpoint
from forgekeeper.platform.settings import Settings
from forgekeeper.platform.settings.cron import Cron
from metrics.instruments import Instruments

RESEND_AFTER = timedelta(seconds=30)
"""Time after which a sent run that has not started is sent again; shorter if processes expire sooner."""
SCHEDULER_COUNTERS = Instruments("scheduler")
"""Counters of runs that this process has sent or failed to send."""
Deliver = Callable[[JobRun], None]
"""Sends the message of a run; raises `redis.RedisError`."""
MISFIRE_GRACE = timedelta(minutes=1)
"""A tick found later than this was missed; the documents promise a minute at most."""
MAX_OLDER_TICKS = 100
"""Maximum older ticks that get a row each after an outage; the ledger need not list a week of minutes."""
LONGEST_RETRY = MAX_RETRY_DELAY + CLOCK_TOLERANCE
"""A run that waits longer for its retry was written while the clock was ahead."""
TICK_RESOLUTION = timedelta(microseconds=1)
SET_ASIDE_REPORTED_FOR = timedelta(hours=1)
"""How long a tick that was set aside is reported."""
# Rows with a time in the future were written while the clock was ahead.  A closed row gives its tick back, so that the
# real tick can run, and keeps the tick in its result.  Its end is set to now, and its duration stays.  PostgreSQL uses
# no index for a volatile function: a horizon from outside selects the rows, and the database's clock decides about
# them, because a process that was delayed meanwhile does not know that clock.
CLOSED_RUN_IS_AHEAD = """(
    state not in ('claimed', 'enqueued', 'started') and (tick > {horizon} or finished_at > {horizon})
    and greatest(tick, finished_at) > clock_timestamp() + %(tolerance)s
)"""
SET_TICKS_ASIDE = f"""
    update job_runs set
        result = case when tick > clock_timestamp() + %(tolerance)s
            then coalesce(result, '{{}}') || jsonb_build_object('set_aside', tick) else result end,
        tick = case when tick <= clock_timestamp() + %(tolerance)s then tick end,
        claimed_at = least(claimed_at, clock_timestamp()), enqueued_at = least(enqueued_at, clock_timestamp()),
        started_at = case when started_at > clock_timestamp()
            then clock_timestamp() - greatest(finished_at - started_at, interval '0') else started_at end,
        alive_at = least(alive_at, clock_timestamp()), finished_at = clock_timestamp()
    where batch = %(batch)s and {CLOSED_RUN_IS_AHEAD.format(horizon="%(horizon)s")}
    returning (result ->> 'set_aside')::timestamptz
"""
# The open row is at work and keeps its tick while it is open.  It waits no longer than a right clock allows.
OPEN_RUN_IS_AHEAD = """(
    state in ('claimed', 'enqueued', 'started') and (
        greatest(claimed_at, enqueued_at, started_at, alive_at) > clock_timestamp() + %(tolerance)s
        or retry_at > clock_timestamp() + %(longest_retry)s
    )
)"""
CORRECT_OPEN_RUN = f"""
    update job_runs set
        claimed_at = least(claimed_at, clock_timestamp()),
        enqueued_at = case when enqueued_at is not null then least(enqueued_at, clock_timestamp()) end,
        started_at = least(started_at, clock_timestamp()), alive_at = least(alive_at, clock_timestamp()),
        retry_at = case when retry_at <= clock_timestamp() + %(longest_retry)s then retry_at
            when retry_at is not null then clock_timestamp() end
    where batch = %(batch)s and {OPEN_RUN_IS_AHEAD}
"""
COUNT_TICKS_AHEAD = """
    select count(tick) from (
        select tick from job_runs
        where batch = %(batch)s and tick > (select clock_timestamp() + %(tolerance)s)
        union all
        select (result ->> 'set_aside')::timestamptz from job_runs
        where batch = %(batch)s and tick is null and result ? 'set_aside'
          and finished_at > clock_timestamp() - %(shown)s
    ) as ahead
"""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class TickDecision:
    """The state of ticks, the newest first.

    A tick is claimed unless a hold or an open run forbids it.
    """

    ticks: tuple[datetime, ...]
    state: Literal["claimed", "coalesced", "missed"]
    reason: Literal["catch_up", "skip"] | None = None


def reconcile_batch(
    batch: str, settings: Settings, deliver: Deliver, *, by: str, due_hint: datetime | None = None
) -> None:
    """Bring the batch to its right state.

    *due_hint* is the tick that is due by the caller's own clock.  Idempotent, and safe in many processes at once.
    Raises `peewee.PeeweeException` and `redis.RedisError` if a server is down.  Nothing is lost then, and the next call
    continues.
    """
    if aside := correct_times(batch):
        newest = max(aside).isoformat()
        log.error("ticks in the future set aside", batch=batch, ticks=len(aside), newest=newest)
    for lost in JobRun.reopen_lost(batch, dead_after=settings.dead_after):
        SCHEDULER_COUNTERS.inc("forgekeeper_scheduler_runs_reopened_total", batch)
        log.warning("run taken from a silent worker", batch=batch, **lost)
    schedule = settings.schedule_of(batch)
    if schedule is not None:
        known = JobRun.newest_tick(batch) or _read_registered_at(batch)
        catch_up, window = settings.missed_tick_policy(batch), settings.max_tick_age(batch)
        decisions = decide_ticks(now(), known, schedule, catch_up=catch_up, window=window, due_hint=due_hint)
        _carry_out(batch, decisions, by=by)
    send_open_run(batch, deliver, again_after=read_resend_delay(settings))


def read_resend_delay(settings: Settings) -> timedelta:
    """Return the time after which a sent run that has not started is sent again."""
    return min(RESEND_AFTER, 2 * settings.dead_after)


def send_open_run(batch: str, deliver: Deliver, *, again_after: timedelta = RESEND_AFTER) -> None:
    """Send the batch's open run, unless it must not be sent now.

    It is not sent if it runs, waits for its retry, or was sent less than *again_after* ago.  Of several processes only
    one sends it.  A message that is lost delays the run by that time.  An error of Redis delays it until the next call:
    if Redis has stored the message nevertheless, the first of two messages starts the run.
    """
    run = JobRun.mark_sent(batch, again_after=again_after)
    if run is None:
        return
    try:
        deliver(run)
    except redis.RedisError:
        JobRun.mark_unsent(run.id)
        raise
    SCHEDULER_COUNTERS.inc("forgekeeper_scheduler_enqueued_total", batch)
    SCHEDULER_COUNTERS.set_to_now("forgekeeper_scheduler_last_enqueue_timestamp_seconds", batch)
    log.info("run sent", batch=batch, run=run.id, tick=run.tick and run.tick.isoformat())
    failpoint("tick.sent")


def decide_ticks(
    now: datetime,
    newest_recorded: datetime,
    schedule: Cron,
    *,
    catch_up: Literal["once", "skip"],
    window: timedelta,
    due_hint: datetime | None = None,
) -> list[TickDecision]:
    """Decide about every tick later than *newest_recorded* and due *now*; the newest comes first.

    *newest_recorded* is the newest tick that has a row.  The function reads and changes nothing: equal arguments give
    equal decisions, so any number of schedulers may decide at once, and the first claim gets the tick.  With *catch_up*
    ``once`` the newest tick runs late, unless it is older than *window*; with ``skip`` it does not run.  *due_hint* is
    the tick that is due by a scheduler's own clock, believed up to `CLOCK_TOLERANCE` before *now*.  After a long outage
    the oldest ticks are left out.
    """
    due = schedule.latest_until(now)
    if due_hint is not None and due < due_hint <= now + CLOCK_TOLERANCE:
        due = due_hint
    if due <= newest_recorded:
        return []
    late, horizon = due < now - MISFIRE_GRACE, now - window
    older = list(islice(_iterate_ticks(due, newest_recorded, schedule), MAX_OLDER_TICKS))
    within = tuple(tick for tick in older if tick > horizon)
    if late and catch_up == "skip":
        decisions = [TickDecision((due,), "missed", "skip"), TickDecision(within, "missed", "skip")]
    elif late and due <= horizon:
        decisions = [TickDecision((due,), "missed")]
    else:
        # The newest tick also does the work of the older ticks within the window.
        decisions = [TickDecision((due,), "claimed", "catch_up" if late else None), TickDecision(within, "coalesced")]
    decisions.append(TickDecision(tuple(older[len(within) :]), "missed"))
    return [decision for decision in decisions if decision.ticks]


def correct_times(batch: str) -> list[datetime]:
    """Correct times that were written while the clock was ahead; return the ticks set aside."""
    moment = pw.fn.clock_timestamp()
    Batch.update(registered_at=moment).where(Batch.name == batch, Batch.registered_at > moment).execute()
    Hold.update(since=moment).where(Hold.batch == batch, Hold.since > moment).execute()
    Hold.copy_to_batches(batch)
    values = {"batch": batch, "tolerance": CLOCK_TOLERANCE, "longest_retry": LONGEST_RETRY}
    rows = database.execute_sql(SET_TICKS_ASIDE, values | {"horizon": now() + CLOCK_TOLERANCE}).fetchall()
    database.execute_sql(CORRECT_OPEN_RUN, values)
    return [tick for (tick,) in rows if tick is not None]


def count_ticks_ahead(batch: str) -> int:
    """Count the ticks in the future, and the ticks that were set aside within the last hour."""
    values = {"batch": batch, "tolerance": CLOCK_TOLERANCE, "shown": SET_ASIDE_REPORTED_FOR}
    return int(database.execute_sql(COUNT_TICKS_AHEAD, values).fetchone()[0])


def _read_registered_at(batch: str) -> datetime:
    """Return when the batch was registered; ticks before that were not missed."""
    Batch.register([batch])
    registered: datetime = Batch.get_by_id(batch).registered_at
    return registered


def _carry_out(batch: str, decisions: Sequence[TickDecision], *, by: str) -> None:
    records = [decision for decision in decisions if decision.state != "claimed"]
    if records:
        ticks = sum(JobRun.record_ticks(batch, one.ticks, one.state, by=by, reason=one.reason) for one in records)
        SCHEDULER_COUNTERS.inc("forgekeeper_scheduler_misfires_total", batch, by=ticks)
        if ticks:
            log.warning("ticks missed", batch=batch, ticks=ticks, oldest=records[-1].ticks[-1].isoformat())
    for decision in decisions:
        if decision.state == "claimed":
            _claim_or_skip(batch, decision.ticks[0], decision.reason, by=by)


def _claim_or_skip(batch: str, tick: datetime, reason: str | None, *, by: str) -> None:
    """Claim the tick, or record its obstacle: a hold, or an open run."""
    if JobRun.claim(batch, tick, by=by, reason=reason) is not None:
        failpoint("tick.claimed")
        return
    why = Hold.find_state(batch) or "overlap"
    if JobRun.record_ticks(batch, [tick], "skipped", by=by, reason=why):
        run = JobRun.find_open(batch) if why == "overlap" else None
        # A run that waits for a worker is not a fault of the schedule, and is not counted.
        if run is not None and run.state == "started":
            SCHEDULER_COUNTERS.inc("forgekeeper_scheduler_max_instances_total", batch)
        log.info("tick skipped", batch=batch, tick=tick.isoformat(), reason=why)


def _iterate_ticks(tick: datetime, known: datetime, schedule: Cron) -> Iterator[datetime]:
    """Yield the ticks between *known* and *tick*, newest first."""
    while (tick := schedule.latest_until(tick - TICK_RESOLUTION)) > known:
        yield tick
