"""Moves a batch to where it should be, whatever a crash, a lost message or an emptied Redis has left behind.

Rows decide, with the database's clock: what is due, who claims it and what became of it.
So anyone may reconcile, at any moment, any number of times, beside any number of others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

import structlog

from forgekeeper.database import now
from forgekeeper.failpoints import failpoint
from forgekeeper.runs import clocks
from forgekeeper.runs.holds import Batch as BatchRow
from forgekeeper.runs.holds import Hold
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.plan import Decision, Policy, plan
from forgekeeper.settings import Settings
from metrics.counting import Instruments

SENT_AGAIN = timedelta(seconds=30)
"""A run that was sent so long ago and has not started is sent again; sooner where a process expires sooner."""
COUNT = Instruments("scheduler")
"""What this process has sent, and what it could not."""
Deliver = Callable[[JobRun], None]
"""Sends the message of a run; raises `redis.RedisError`."""

log = structlog.get_logger(__name__)


def reconcile(batch: str, settings: Settings, deliver: Deliver, *, by: str, due_hint: datetime | None = None) -> None:
    """Move the batch to where it should be now; idempotent, safe in many processes at once.

    *due_hint* is the tick that the caller's own clock says is due.
    Raises `peewee.PeeweeException` and `redis.RedisError` when a server is away: then
    nothing is lost, and the next call goes on from there.
    """
    if aside := clocks.set_right(batch):
        newest = max(aside).isoformat()
        log.error("ticks set aside, their time has not come", batch=batch, ticks=len(aside), newest=newest)
    for lost in JobRun.reopen_lost(batch, dead_after=settings.dead_after):
        COUNT.inc("forgekeeper_scheduler_runs_reopened_total", batch)
        log.warning("run taken from a silent worker", batch=batch, **lost)
    schedule = settings.cron(batch)
    if schedule is not None:
        known = JobRun.newest_tick(batch) or _registered(batch)
        policy = Policy(settings.catch_up(batch), settings.window(batch))
        _carry_out(batch, plan(now(), known, schedule, policy, due_hint=due_hint), by=by)
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


def _registered(batch: str) -> datetime:
    """Return since when the batch is known; what was due before that was not missed."""
    BatchRow.register([batch])
    registered: datetime = BatchRow.get_by_id(batch).registered_at
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
