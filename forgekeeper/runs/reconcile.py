"""Moves a batch to where it should be, whatever a crash, a lost message or an emptied Redis has left behind.

Rows decide, with the database's clock: what is due, who claims it and what became of it.
So anyone may reconcile, at any moment, any number of times, beside any number of others.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from time import monotonic
from typing import Protocol

from forgekeeper.database import now
from forgekeeper.failpoints import failpoint
from forgekeeper.runs import clock_ahead, reports
from forgekeeper.runs.batch import Batch as BatchRow
from forgekeeper.runs.holds import Hold
from forgekeeper.runs.ledger import CLOCK_TOLERANCE, JobRun
from forgekeeper.runs.plan import Claim, Decisions, Policy, Record, plan
from forgekeeper.runs.retry import BLOCKED_AGAIN
from forgekeeper.settings import Settings
from forgekeeper.settings.cron import Cron

TICK_AHEAD = timedelta(minutes=1)
"""A tick that is so near looks again by itself, and finds nothing in its way."""
PRECEDENCE = timedelta(seconds=1)
"""For so long a claimed run is its claimant's to send, and a sent one its message's to arrive."""


class Delivery(Protocol):
    """The way of a batch's messages, of which its runs know no more than this."""

    def is_dead(self, run: JobRun) -> bool:
        """Say whether the run's message is a dead letter."""

    def enqueue(self, run: JobRun) -> bool:
        """Send the run's message; return False when it is on its way already."""


def reconcile(batch: str, settings: Settings, delivery: Delivery, *, by: str, due_hint: datetime | None = None) -> None:
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
        instant = now()
        known = JobRun.newest_tick(batch) or _registered(batch)
        policy = Policy(settings.catch_up(batch), settings.window(batch), CLOCK_TOLERANCE)
        _carry_out(batch, plan(instant, known, schedule, policy, due_hint=due_hint), by=by)
        if not _ticks_soon(schedule, instant):
            JobRun.reopen_blocked(batch, after=_blocked_again(settings))
    send(batch, delivery, by=by)


def send(batch: str, delivery: Delivery, *, by: str | None = None) -> None:
    """Send the batch's open run, unless it runs, waits for its retry, or is on its way already.

    A scheduler, *by*, leaves a fresh one to its claimant and its message: a worker may start
    and end it between this look at its row and the sending, which would be a second one.
    """
    looked = monotonic()
    run = JobRun.open(batch)
    if run is None or run.state == "started":
        return
    if delivery.is_dead(run):
        if JobRun.give_up(run, reason="dead_lettered"):
            reports.dead_lettered(run)
        return
    instant = now()
    if by is not None and _is_fresh(run, instant, by=by):
        return
    if Hold.why(batch) or (run.retry_at and run.retry_at > instant):
        return
    if monotonic() - looked > PRECEDENCE.total_seconds() and not _still_waits(run):
        # This process was stopped, or had to wait, and another has sent it meanwhile.
        return
    if delivery.enqueue(run):
        reports.enqueued(run)
    failpoint("tick.sent")
    JobRun.mark_enqueued(run)


def _blocked_again(settings: Settings) -> timedelta:
    return min(settings.retry_after, BLOCKED_AGAIN)


def _ticks_soon(schedule: Cron, instant: datetime) -> bool:
    return schedule.after(instant) - instant <= TICK_AHEAD


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


def _is_fresh(run: JobRun, instant: datetime, *, by: str) -> bool:
    if run.state == "claimed" and run.claimed_by == by:
        return False
    since = run.enqueued_at or run.claimed_at
    return since is not None and timedelta(0) <= instant - since < PRECEDENCE


def _still_waits(run: JobRun) -> bool:
    newest = JobRun.open(run.batch)
    return newest is not None and newest.id == run.id and newest.state != "started"
