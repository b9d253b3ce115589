"""Moves a batch to where it should be, whatever a crash, a lost message or an emptied Redis has left behind.

Rows decide, with the database's clock: what is due, who claims it and what became of it.
So anyone may reconcile, at any moment, any number of times, beside any number of others.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from forgekeeper.database import now
from forgekeeper.failpoints import failpoint
from forgekeeper.runs import clock_ahead, reports
from forgekeeper.runs.batch import Batch as BatchRow
from forgekeeper.runs.holds import Hold
from forgekeeper.runs.ledger import CLOCK_TOLERANCE, JobRun
from forgekeeper.runs.plan import Claim, Decisions, Policy, Record, plan
from forgekeeper.settings import Settings

SENT_AGAIN = timedelta(seconds=30)
"""A run that was sent so long ago and has not started is sent again; sooner where a process expires sooner."""


Deliver = Callable[[JobRun], None]
"""Sends the message of a run; raises `redis.RedisError`."""


def reconcile(batch: str, settings: Settings, deliver: Deliver, *, by: str, due_hint: datetime | None = None) -> None:
    """Move the batch to where it should be now; idempotent, safe in many processes at once.

    *due_hint* is the tick that the caller's own clock says is due.
    Raises `peewee.PeeweeException` and `redis.RedisError` when a server is away: then
    nothing is lost, and the next call goes on from there.
    """
    reports.set_aside(batch, clock_ahead.set_right(batch))
    for lost in JobRun.reopen_lost(batch, dead_after=settings.dead_after):
        reports.reopened(batch, lost)
    schedule = settings.cron(batch)
    if schedule is not None:
        known = JobRun.newest_tick(batch) or _registered(batch)
        policy = Policy(settings.catch_up(batch), settings.window(batch), CLOCK_TOLERANCE)
        _carry_out(batch, plan(now(), known, schedule, policy, due_hint=due_hint), by=by)
    send(batch, deliver, again_after=min(SENT_AGAIN, 2 * settings.dead_after))


def send(batch: str, deliver: Deliver, *, again_after: timedelta = SENT_AGAIN) -> None:
    """Send the batch's open run, unless it runs, waits for its retry, or was sent less than *again_after* ago.

    Of several processes one sends it.  A message that was lost costs that time.
    """
    run = JobRun.mark_sent(batch, again_after=again_after)
    if run is None:
        return
    try:
        deliver(run)
    except Exception:
        JobRun.mark_unsent(run)
        raise
    reports.enqueued(run)
    failpoint("tick.sent")


def _registered(batch: str) -> datetime:
    """Return since when the batch is known; what was due before that was not missed."""
    BatchRow.register([batch])
    registered: datetime = BatchRow.get_by_id(batch).registered_at
    return registered


def _carry_out(batch: str, decisions: Decisions, *, by: str) -> None:
    if decisions.older:
        recorded = sum(_record(batch, record, by=by) for record in decisions.older)
        reports.missed(batch, recorded, oldest=decisions.older[-1].ticks[-1])
    if isinstance(decisions.newest, Record):
        reports.misfired(batch, _record(batch, decisions.newest, by=by))
    elif decisions.newest is not None:
        _claim(batch, decisions.newest, by=by)


def _record(batch: str, record: Record, *, by: str) -> int:
    return JobRun.record(batch, record.ticks, record.state, by=by, reason=record.reason)


def _claim(batch: str, claim: Claim, *, by: str) -> None:
    if JobRun.claim(batch, claim.tick, by=by, reason=claim.reason) is not None:
        failpoint("tick.claimed")
        return
    reason = Hold.why(batch) or "overlap"
    if JobRun.record(batch, [claim.tick], "skipped", by=by, reason=reason):
        run = JobRun.open(batch) if reason == "overlap" else None
        reports.skipped(batch, claim.tick, reason=reason, running=run is not None and run.state == "started")
