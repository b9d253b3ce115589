"""Moves a batch to where it should be, whatever a crash, a lost message or an emptied Redis has left behind.

Rows decide, with the database's clock: what is due, who claims it and what became of it.  So anyone may reconcile, at
any moment, any number of times, beside any number of others.  What was written while that clock was ahead is set aside
and reported, so that it holds nothing back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Literal

import peewee as pw
import structlog

from forgekeeper.ledger.holds import Batch, Hold
from forgekeeper.ledger.job_runs import CLOCK_TOLERANCE, JobRun
from forgekeeper.ledger.retry import LONGEST_RETRY
from forgekeeper.platform.database import database, now
from forgekeeper.platform.failpoints import failpoint
from forgekeeper.platform.settings import Settings
from forgekeeper.platform.settings.cron import Cron
from metrics.counting import Instruments

SENT_AGAIN = timedelta(seconds=30)
"""A run that was sent so long ago and has not started is sent again; sooner where a process expires sooner."""
COUNT = Instruments("scheduler")
"""What this process has sent, and what it could not."""
Deliver = Callable[[JobRun], None]
"""Sends the message of a run; raises `redis.RedisError`."""
MISFIRE_GRACE = timedelta(minutes=1)
"""A tick found later than this was missed; the documents promise a minute at most."""
REMEMBERED = 100
"""How many older ticks get a row each after an outage; the ledger need not list a week of minutes."""
MICROSECOND = timedelta(microseconds=1)
SHOWN = timedelta(hours=1)
"""For so long a tick that was set aside is reported."""
# What has a time that has not come was written while the clock was ahead.  A closed row gives its tick back, for the
# real one to run, and remembers it in its result; it ended before now, and lasted as long as it did.  No index would be
# used for a volatile function: so the rows are looked for by a horizon from outside, and judged by the clock, which a
# process that was delayed meanwhile cannot know.
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
          and finished_at > clock_timestamp() - %(shown)s
    ) as ahead
"""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Decision:
    """What becomes of ticks, the newest first: one is claimed, unless a hold or an open run forbids that."""

    ticks: tuple[datetime, ...]
    state: Literal["claimed", "coalesced", "missed"]
    reason: Literal["catch_up", "skip"] | None = None


def reconcile(batch: str, settings: Settings, deliver: Deliver, *, by: str, due_hint: datetime | None = None) -> None:
    """Move the batch to where it should be now; *due_hint* is the tick that the caller's own clock says is due.

    Idempotent, safe in many processes at once.  Raises `peewee.PeeweeException` and `redis.RedisError` when a server is
    away: then nothing is lost, and the next call goes on from there.
    """
    if aside := set_right(batch):
        newest = max(aside).isoformat()
        log.error("ticks set aside, their time has not come", batch=batch, ticks=len(aside), newest=newest)
    for lost in JobRun.reopen_lost(batch, dead_after=settings.dead_after):
        COUNT.inc("forgekeeper_scheduler_runs_reopened_total", batch)
        log.warning("run taken from a silent worker", batch=batch, **lost)
    schedule = settings.cron(batch)
    if schedule is not None:
        known = JobRun.newest_tick(batch) or _registered(batch)
        catch_up, window = settings.catch_up(batch), settings.window(batch)
        decisions = plan(now(), known, schedule, catch_up=catch_up, window=window, due_hint=due_hint)
        _carry_out(batch, decisions, by=by)
    send(batch, deliver, again_after=min(SENT_AGAIN, 2 * settings.dead_after))


def send(batch: str, deliver: Deliver, *, again_after: timedelta = SENT_AGAIN) -> None:
    """Send the batch's open run, unless it runs, waits for its retry, or was sent less than *again_after* ago.

    Of several processes one sends it.  A message that was lost, or could not be sent, costs that time.
    """
    run = JobRun.mark_sent(batch, again_after=again_after)
    if run is None:
        return
    deliver(run)
    COUNT.inc("forgekeeper_scheduler_enqueued_total", batch)
    COUNT.mark("forgekeeper_scheduler_last_enqueue_timestamp_seconds", batch)
    log.info("run sent", batch=batch, run=run.id, tick=run.tick and run.tick.isoformat())
    failpoint("tick.sent")


def plan(
    now: datetime,
    known: datetime,
    schedule: Cron,
    *,
    catch_up: Literal["once", "skip"],
    window: timedelta,
    due_hint: datetime | None = None,
) -> list[Decision]:
    """Decide about every tick later than *known*, the newest that has a row, and due *now*; the newest comes first.

    Nothing is asked and nothing changed: the same arguments give the same decisions, so any number of schedulers may
    decide at once, and the first to claim it has the tick.  With *catch_up* ``once`` the newest runs late, unless it
    is older than *window*; with ``skip`` it does not.  *due_hint* is the tick that a scheduler's own clock says is due,
    believed up to `CLOCK_TOLERANCE` before *now* gets there.  After a long outage the oldest are not decided about.
    """
    due = schedule.newest(now)
    if due_hint is not None and due < due_hint <= now + CLOCK_TOLERANCE:
        due = due_hint
    if due <= known:
        return []
    late, horizon = due < now - MISFIRE_GRACE, now - window
    older = list(islice(_before(due, known, schedule), REMEMBERED))
    within = tuple(tick for tick in older if tick > horizon)
    if late and catch_up == "skip":
        decisions = [Decision((due,), "missed", "skip"), Decision(within, "missed", "skip")]
    elif late and due <= horizon:
        decisions = [Decision((due,), "missed")]
    else:
        # The newest tick does the work of those within the window.
        decisions = [Decision((due,), "claimed", "catch_up" if late else None), Decision(within, "coalesced")]
    decisions.append(Decision(tuple(older[len(within) :]), "missed"))
    return [decision for decision in decisions if decision.ticks]


def set_right(batch: str) -> list[datetime]:
    """Correct what was written while the clock was ahead, and nothing else; return the ticks that were set aside."""
    moment = pw.fn.clock_timestamp()
    Batch.update(registered_at=moment).where(Batch.name == batch, Batch.registered_at > moment).execute()
    Hold.update(since=moment).where(Hold.batch == batch, Hold.since > moment).execute()
    Hold.show(batch)
    values = {"batch": batch, "tolerance": CLOCK_TOLERANCE, "longest_retry": LONGEST_RETRY + CLOCK_TOLERANCE}
    rows = database.execute_sql(SET_ASIDE, values | {"horizon": now() + CLOCK_TOLERANCE}).fetchall()
    database.execute_sql(SET_RIGHT, values)
    return [tick for (tick,) in rows if tick is not None]


def ahead(batch: str) -> int:
    """Count the ticks whose time has not come, and those that were set aside for it within the last hour."""
    values = {"batch": batch, "tolerance": CLOCK_TOLERANCE, "shown": SHOWN}
    return int(database.execute_sql(AHEAD, values).fetchone()[0])


def _registered(batch: str) -> datetime:
    """Return since when the batch is known; what was due before that was not missed."""
    Batch.register([batch])
    registered: datetime = Batch.get_by_id(batch).registered_at
    return registered


def _carry_out(batch: str, decisions: Sequence[Decision], *, by: str) -> None:
    records = [decision for decision in decisions if decision.state != "claimed"]
    if records:
        ticks = sum(JobRun.record(batch, one.ticks, one.state, by=by, reason=one.reason) for one in records)
        COUNT.inc("forgekeeper_scheduler_misfires_total", batch, by=ticks)
        if ticks:
            log.warning("ticks missed", batch=batch, ticks=ticks, oldest=records[-1].ticks[-1].isoformat())
    for decision in decisions:
        if decision.state == "claimed":
            _claim(batch, decision.ticks[0], decision.reason, by=by)


def _claim(batch: str, tick: datetime, reason: str | None, *, by: str) -> None:
    """Claim the tick, or record what turns it away: a hold, or an open run."""
    if JobRun.claim(batch, tick, by=by, reason=reason) is not None:
        failpoint("tick.claimed")
        return
    why = Hold.why(batch) or "overlap"
    if JobRun.record(batch, [tick], "skipped", by=by, reason=why):
        run = JobRun.open(batch) if why == "overlap" else None
        # A run that waits for a worker is no fault of the timetable, and is not counted.
        if run is not None and run.state == "started":
            COUNT.inc("forgekeeper_scheduler_max_instances_total", batch)
        log.info("tick skipped", batch=batch, tick=tick.isoformat(), reason=why)


def _before(tick: datetime, known: datetime, schedule: Cron) -> Iterator[datetime]:
    """Yield the ticks between *known* and *tick*, newest first."""
    while (tick := schedule.newest(tick - MICROSECOND)) > known:
        yield tick
