"""The timetable, and the process that keeps it.

Any number of schedulers run side by side, without a leader.  APScheduler only says
*now*; what is due, who claims it and what became of it is decided by rows, with the
database's clock.  `reconcile` may be called at any moment, by anyone, any number of
times: it moves a batch to where it should be, and repairs whatever a crash, a lost
message or an emptied Redis has left behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from itertools import islice
from queue import SimpleQueue
from time import monotonic

import peewee as pw
import redis
import structlog
from apscheduler.events import EVENT_JOB_SUBMITTED, EVENT_SCHEDULER_STARTED, JobSubmissionEvent
from apscheduler.schedulers.blocking import BlockingScheduler
from dramatiq.common import current_millis

from forgekeeper.batches import BATCHES, BatchSpec
from forgekeeper.database import database, now, release
from forgekeeper.delivery.enqueue_unique import is_dead, push_once
from forgekeeper.failpoints import arm, failpoint
from forgekeeper.process import signals
from forgekeeper.process.actors import message_of
from forgekeeper.process.broker import broker
from forgekeeper.process.presence import Presence
from forgekeeper.process.ready import tell_supervisor
from forgekeeper.runs.attempt import LONGEST_RETRY, describe, identity
from forgekeeper.runs.batch import Batch as BatchRow
from forgekeeper.runs.ledger import CLOCK_TOLERANCE, JobRun
from forgekeeper.settings import Settings
from forgekeeper.settings.cron import Cron
from metrics.instruments import Instruments
from metrics.threads import Vital, ended_itself

LATE = timedelta(minutes=1)
"""A tick found later than this was missed; the documents promise a minute at most."""
PRECEDENCE = timedelta(seconds=1)
"""For so long a claimed run is its claimant's to send, and a sent one its message's to arrive."""
HEARTBEAT = timedelta(seconds=15)
AGAIN = 1.0
"""Seconds after which a loop turns again whose turn has failed though no server was away."""
TURN_CUT = timedelta(seconds=3)
"""For so long all loops together may finish their turns when the process is to end; to cut one off costs nothing."""
REMEMBERED = 100
"""How many older ticks get a row each after an outage; the ledger need not list a week of minutes."""
NONSENSE = (ValueError, ArithmeticError, RecursionError)
"""What comes of a row with an instant, or a document, that no process of ours has written."""

COUNT = Instruments("scheduler")
"""What this process has sent, and what it could not."""

log = structlog.get_logger(__name__)


def reconcile(batch: BatchSpec, settings: Settings, *, by: str, told: datetime | None = None) -> None:
    """Move the batch to where it should be now; idempotent, safe in many processes at once.

    *told* is the tick that the caller's own clock says is due.  It is believed up to
    `CLOCK_TOLERANCE` before the database's clock gets there, and no further.
    Raises `peewee.PeeweeException` and `redis.RedisError` when a server is away: then
    nothing is lost, and the next call goes on from there.
    """
    _set_right(batch)
    for lost in JobRun.reopen_lost(batch.name, dead_after=settings.dead_after):
        COUNT.inc("forgekeeper_scheduler_runs_reopened_total", batch.name)
        log.warning("run taken from a silent worker", batch=batch.name, **lost._asdict())
    schedule = settings.cron(batch.name)
    if schedule is not None:
        _plan(batch, schedule, settings, by=by, told=told)
    send(batch, by=by)


def _set_right(batch: BatchSpec) -> None:
    """Let what was written while the database's clock was ahead hold nothing back now that it is right."""
    BatchRow.set_right(batch.name)
    aside = JobRun.set_right(batch.name, longest_retry=LONGEST_RETRY)
    if aside.newest is not None:
        newest = aside.newest.isoformat()
        log.error("ticks set aside, their time has not come", batch=batch.name, ticks=aside.ticks, newest=newest)


def send(batch: BatchSpec, *, by: str | None = None) -> None:
    """Send the batch's open run, unless it runs, waits for its retry, or is on its way already.

    A scheduler, *by*, leaves a fresh one to its claimant and its message: a worker may start
    and end it between this look at its row and the sending, which would be a second one.
    """
    looked = monotonic()
    run = JobRun.open(batch.name)
    if run is None or run.state == "started":
        return
    message = message_of(batch, run)
    if is_dead(broker, message):
        if JobRun.give_up(run, reason="dead_lettered"):
            log.error("run given up", batch=batch.name, run=run.id, reason="dead_lettered")
        return
    instant = now()
    if by is not None and _is_fresh(run, instant, by=by):
        return
    if BatchRow.paused(batch.name).exists() or (run.retry_at and run.retry_at > instant):
        return
    if monotonic() - looked > PRECEDENCE.total_seconds() and not _still_waits(run):
        # We were stopped, or had to wait, and another has sent it meanwhile.
        return
    if push_once(broker, message):
        COUNT.inc("forgekeeper_scheduler_enqueued_total", batch.name)
        COUNT.mark("forgekeeper_scheduler_last_enqueue_timestamp_seconds", batch.name)
        log.info("run sent", batch=batch.name, run=run.id, tick=run.tick and run.tick.isoformat())
    failpoint("tick.sent")
    JobRun.mark_enqueued(run)


def _is_fresh(run: JobRun, instant: datetime, *, by: str) -> bool:
    if run.state == "claimed" and run.claimed_by == by:
        return False
    since = run.enqueued_at or run.claimed_at
    return since is not None and timedelta(0) <= instant - since < PRECEDENCE


def _still_waits(run: JobRun) -> bool:
    newest = JobRun.open(run.batch)
    return newest is not None and newest.id == run.id and newest.state != "started"


def _plan(batch: BatchSpec, schedule: Cron, settings: Settings, *, by: str, told: datetime | None) -> None:
    """Give every tick up to now its row: claimed, skipped, coalesced or missed."""
    instant = now()
    due = schedule.newest(instant)
    if told is not None and due < told <= instant + CLOCK_TOLERANCE:
        due = told
    known = JobRun.newest_tick(batch.name) or _registered(batch)
    if due <= known:
        return
    horizon = instant - settings.window(batch.name)
    late = due < instant - LATE
    skipped = settings.catch_up(batch.name) == "skip"
    _record_older(batch, list(_before(schedule, due, known)), horizon, skipped=late and skipped, by=by)
    if late and (skipped or due <= horizon):
        missed = JobRun.record(batch.name, [due], "missed", by=by, reason="skip" if skipped else None)
        COUNT.inc("forgekeeper_scheduler_misfires_total", batch.name, by=missed)
        return
    if JobRun.claim(batch.name, due, by=by, reason="catch_up" if late else None) is not None:
        failpoint("tick.claimed")
        return
    reason = "paused" if BatchRow.paused(batch.name).exists() else "overlap"
    if JobRun.record(batch.name, [due], "skipped", by=by, reason=reason):
        if reason == "overlap" and _at_work(batch):
            COUNT.inc("forgekeeper_scheduler_max_instances_total", batch.name)
        log.info("tick skipped", batch=batch.name, tick=due.isoformat(), reason=reason)


def _at_work(batch: BatchSpec) -> bool:
    """Say whether a run is in the way, not one that waits for a worker: that is no fault of the timetable."""
    run = JobRun.open(batch.name)
    return run is not None and run.state == "started"


def _record_older(batch: BatchSpec, ticks: list[datetime], horizon: datetime, *, skipped: bool, by: str) -> None:
    """Record ticks that nobody claimed in time: the newest one does their work, unless it is skipped too."""
    recent = [tick for tick in ticks if tick > horizon]
    state, reason = ("missed", "skip") if skipped else ("coalesced", None)
    recorded = JobRun.record(batch.name, recent, state, by=by, reason=reason)
    recorded += JobRun.record(batch.name, [tick for tick in ticks if tick <= horizon], "missed", by=by)
    if recorded:
        COUNT.inc("forgekeeper_scheduler_misfires_total", batch.name, by=recorded)
        log.warning("ticks missed", batch=batch.name, ticks=recorded, oldest=ticks[-1].isoformat())


def _before(schedule: Cron, due: datetime, known: datetime) -> Iterator[datetime]:
    """Yield the ticks between *known* and *due*, newest first, not more than we remember."""

    def backwards() -> Iterator[datetime]:
        tick = due
        while (tick := schedule.newest(tick - timedelta(microseconds=1))) > known:
            yield tick

    return islice(backwards(), REMEMBERED)


def _registered(batch: BatchSpec) -> datetime:
    """Return since when the batch is known; what was due before that was not missed."""
    BatchRow.register([batch.name])
    registered: datetime = BatchRow.get_by_id(batch.name).registered_at
    return registered


class Loop(Vital):
    """Reconciles one batch: when its bell rings, and every few seconds without.

    The pause between two turns is measured by the monotonic clock, so that a wall clock
    that is set back by an hour, which silences APScheduler for as long, costs seconds.
    """

    def __init__(
        self, batch: BatchSpec, settings: Settings, *, broken: threading.Event, asked: SimpleQueue[None]
    ) -> None:
        super().__init__(batch.name)
        self._batch = batch
        self._bell = threading.Event()
        self._told: datetime | None = None
        self._settings = settings
        self._broken = broken
        self._asked = asked
        self._unanswered: float | None = None

    @property
    def stands_still(self) -> float:
        """Say for how many seconds it has been at turns in which a server does not answer."""
        since = self._unanswered
        return 0.0 if since is None else monotonic() - since

    def ring(self, tick: datetime) -> None:
        """Say that *tick* is due by this machine's clock."""
        self._told = tick
        self._bell.set()

    def stop(self) -> None:
        """End after the present turn."""
        self.stopped.set()
        self._bell.set()

    def work(self) -> None:
        """Reconcile until stopped."""
        pause = self._settings.poll_interval.total_seconds()
        try:
            while not self.stopped.is_set():
                self._bell.wait(pause if self.take_turn(self.turn) else min(AGAIN, pause))
                self._bell.clear()
        finally:
            release()

    def broken(self, error: BaseException | None) -> None:
        """End the process: without this loop it is worse than none."""
        self._broken.set()
        self._asked.put(None)
        log.critical("process ends itself", reason=f"its loop {self.name!r} has ended", exc_info=error)

    def turn(self) -> None:
        """Reconcile once; a server that is away, or a row that nobody can read, costs this turn alone."""
        if self._unanswered is None:
            self._unanswered = monotonic()
        try:
            database.connect(reuse_if_open=True)
            told, self._told = self._told, None
            reconcile(self._batch, self._settings, by=identity(), told=told)
            self._unanswered = None
        except (pw.PeeweeException, redis.RedisError, *NONSENSE) as error:
            COUNT.inc("forgekeeper_scheduler_enqueue_failures_total", self._batch.name)
            log.warning("reconcile failed", batch=self._batch.name, error=describe(error))
            release()
        except BaseException:
            COUNT.inc("forgekeeper_scheduler_enqueue_failures_total", self._batch.name)
            release()
            raise


def serve(
    settings: Settings, *, asked: SimpleQueue[None] | None = None, ready: Callable[[], None] = lambda: None
) -> int:
    """Keep the timetable until SIGTERM or SIGINT; return the exit status.

    *asked* is where these come in, should the caller follow them already; *ready* is called once the timetable is kept.

    A loop that breaks ends the process with status 1, for its supervisor to start anew:
    a scheduler that lives on without one of its batches is the worst of all.
    """
    COUNT.zero()
    arm(settings.failpoints)
    clock = BlockingScheduler(timezone="UTC", job_defaults={"misfire_grace_time": None, "coalesce": True})
    broken, asked = threading.Event(), asked or signals.requests()
    loops = [Loop(batch, settings, broken=broken, asked=asked) for batch in BATCHES.values()]
    for loop in loops:
        schedule = settings.cron(loop.name)
        if schedule is not None:
            clock.add_job(_nothing, schedule.trigger, id=loop.name)
        loop.start()
    _ring_when_due(clock, loops)
    _beat(clock, loops)
    _stop_when(asked, clock)
    timetable = {name: str(settings.cron(name) or "off") for name in BATCHES}
    presence = Presence("scheduler", dead_after=settings.dead_after, say=lambda: {"timetable": timetable})
    presence.start()
    log.info("scheduler started", scheduler=identity(), batches=sorted(BATCHES))
    clock.add_listener(lambda _event: _tell_ready(ready), EVENT_SCHEDULER_STARTED)
    clock.start()
    _end(loops, presence, within=min(TURN_CUT, settings.shutdown_timeout).total_seconds())
    log.info("scheduler stopped", scheduler=identity())
    return 1 if broken.is_set() or ended_itself() else 0


def _tell_ready(ready: Callable[[], None]) -> None:
    ready()
    tell_supervisor("READY=1", "STATUS=keeps the timetable")
    log.info("scheduler ready", scheduler=identity())


def _end(loops: list[Loop], presence: Presence, *, within: float) -> None:
    """Let the present turns end, all of them *within* so many seconds together."""
    ends = monotonic() + within
    for loop in loops:
        loop.stop()
    presence.stop(within=within)
    for loop in loops:
        loop.join(max(0.0, ends - monotonic()))
    if cut := [loop.name for loop in loops if loop.is_alive()]:
        log.warning("turns cut off, the next scheduler goes on from there", batches=cut)


def _nothing() -> None:
    """Be a job's function: it is not told which tick it is for, so the event does the work."""


def _ring_when_due(clock: BlockingScheduler, loops: list[Loop]) -> None:
    by_name = {loop.name: loop for loop in loops}

    def submitted(event: JobSubmissionEvent) -> None:
        if event.job_id in by_name:
            by_name[event.job_id].ring(event.scheduled_run_times[-1])

    clock.add_listener(submitted, EVENT_JOB_SUBMITTED)


def _beat(clock: BlockingScheduler, loops: list[Loop]) -> None:
    """Let the clock itself say that it runs, and when it will ring for each batch next.

    A scheduler whose clock runs while a loop gets no answer keeps no timetable: the sign of life is as old as that.
    """

    def beat() -> None:
        for batch in BATCHES:
            job = clock.get_job(batch)
            due = job.next_run_time.timestamp() if job and job.next_run_time else 0
            COUNT.set("forgekeeper_scheduler_next_run_timestamp_seconds", batch, to=due)
        last = current_millis() / 1000 - max(loop.stands_still for loop in loops)
        COUNT.set("forgekeeper_scheduler_heartbeat_timestamp_seconds", to=last)

    clock.add_job(beat, "interval", seconds=HEARTBEAT.total_seconds(), id="heartbeat")
    clock.add_listener(lambda _event: beat(), EVENT_SCHEDULER_STARTED)


class Stopper(Vital):
    """Shuts the clock down when that is asked for; without it no signal would end the process."""

    def __init__(self, asked: SimpleQueue[None], clock: BlockingScheduler) -> None:
        super().__init__("stopper")
        self._asked = asked
        self._clock = clock

    def work(self) -> None:
        """Wait until asked; shut the clock down."""
        self._asked.get()
        while not self.take_turn(lambda: self._clock.shutdown(wait=False)):
            pass
        self.stopped.set()


def _stop_when(asked: SimpleQueue[None], clock: BlockingScheduler) -> None:
    """Shut the clock down once it runs and is *asked* to, by a signal or a broken loop."""
    stopper = Stopper(asked, clock)
    clock.add_listener(lambda _event: stopper.start(), EVENT_SCHEDULER_STARTED)
