"""The timetable, and the process that keeps it.

Any number of schedulers run side by side, without a leader.  APScheduler only wakes the loop of a batch;
`forgekeeper.ledger.reconcile` decides which ticks are due.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from queue import SimpleQueue
from time import monotonic

import peewee as pw
import redis
import structlog
from apscheduler.events import EVENT_SCHEDULER_STARTED
from apscheduler.executors.debug import DebugExecutor
from apscheduler.schedulers.blocking import BlockingScheduler
from dramatiq.common import current_millis

from forgekeeper.api.batches import BATCHES, BatchSpec, all_declared
from forgekeeper.delivery.messages import deliver
from forgekeeper.ledger.processes import Heartbeat
from forgekeeper.ledger.reconcile import COUNT, reconcile
from forgekeeper.platform.connections import identity
from forgekeeper.platform.database import database, release
from forgekeeper.platform.failpoints import arm
from forgekeeper.platform.lifetime import tell_supervisor
from forgekeeper.platform.settings import Settings
from metrics.catalogue import table
from metrics.logs import describe
from metrics.threads import Vital, ended_itself

HEARTBEAT = timedelta(seconds=15)
AGAIN = 1.0
"""Pause in seconds after a turn that failed although no server was down."""
TURN_CUT = timedelta(seconds=3)
"""Time limit for all loops to finish their current turn during shutdown.  Interrupting a turn is harmless."""
NONSENSE = (ValueError, ArithmeticError, RecursionError)
"""Errors of reading a row with a timestamp or a document that no process of ours has written."""

log = structlog.get_logger(__name__)


class Loop(Vital):
    """Reconciles one batch when it is woken, and every few seconds.

    The monotonic clock measures the pause between two turns: if the wall clock is set back by an hour, APScheduler is
    silent for an hour, but a tick is only seconds late.
    """

    def __init__(
        self, batch: BatchSpec, settings: Settings, *, broken: threading.Event, asked: SimpleQueue[None]
    ) -> None:
        super().__init__(batch.name)
        self._woken = threading.Event()
        self._due_hint: datetime | None = None
        self._settings = settings
        self._broken = broken
        self._asked = asked
        self._unanswered: float | None = None

    @property
    def stands_still(self) -> float:
        """The seconds since the first of a series of failed turns began, 0 after a success."""
        since = self._unanswered
        return 0.0 if since is None else monotonic() - since

    def wake(self) -> None:
        """Start a turn now; APScheduler calls this when a tick is due by this machine's clock."""
        schedule = self._settings.cron(self.name)
        if schedule is not None:
            self._due_hint = schedule.newest(datetime.fromtimestamp(current_millis() / 1000, UTC))
        self._woken.set()

    def stop(self) -> None:
        """End after the current turn."""
        self.stopped.set()
        self._woken.set()

    def work(self) -> None:
        """Reconcile until stopped."""
        pause = self._settings.poll_interval.total_seconds()
        try:
            while not self.stopped.is_set():
                self._woken.wait(pause if self.take_turn(self.turn) else min(AGAIN, pause))
                self._woken.clear()
        finally:
            release()

    def broken(self, error: BaseException | None) -> None:
        """End the process: a scheduler without this loop is worse than none."""
        self._broken.set()
        self._asked.put(None)
        log.critical("process ends itself", reason=f"its loop {self.name!r} has ended", exc_info=error)

    def turn(self) -> None:
        """Reconcile once; if a server is down or a row unreadable, only this turn fails."""
        if self._unanswered is None:
            self._unanswered = monotonic()
        try:
            database.connect(reuse_if_open=True)
            due_hint, self._due_hint = self._due_hint, None
            reconcile(self.name, self._settings, deliver, by=identity(), due_hint=due_hint)
            self._unanswered = None
        except BaseException as error:
            COUNT.inc("forgekeeper_scheduler_enqueue_failures_total", self.name)
            release()
            if not isinstance(error, (pw.PeeweeException, redis.RedisError, *NONSENSE)):
                raise
            log.warning("reconcile failed", batch=self.name, error=describe(error))


class Stopper(Vital):
    """Shuts the clock down on a request in *asked*; without it no signal ends the process."""

    def __init__(self, asked: SimpleQueue[None], clock: BlockingScheduler) -> None:
        super().__init__("stopper")
        self.running = threading.Event()
        self._asked = asked
        self._clock = clock

    def work(self) -> None:
        """Wait for a request, and until the clock runs: it cannot be shut down earlier."""
        self._asked.get()
        self.running.wait()
        while not self.take_turn(partial(self._clock.shutdown, wait=False)):
            pass
        self.stopped.set()


def serve(settings: Settings, *, asked: SimpleQueue[None], ready: Callable[[], None]) -> int:
    """Keep the timetable until a signal arrives in *asked*; return the exit status.

    *ready* is called when the timetable is kept.  If a loop breaks, the process ends with status 1, and its supervisor
    restarts it: a scheduler that continues without one of its batches would be worse.
    """
    COUNT.know(table(all_declared())).zero()
    arm(settings.failpoints)
    # A job only sets an event or a few gauges: it needs no thread of its own.
    clock = BlockingScheduler(
        timezone="UTC",
        executors={"default": DebugExecutor()},
        job_defaults={"misfire_grace_time": None, "coalesce": True},
    )
    broken = threading.Event()
    loops = [Loop(batch, settings, broken=broken, asked=asked) for batch in BATCHES.values()]
    for loop in loops:
        schedule = settings.cron(loop.name)
        if schedule is not None:
            clock.add_job(loop.wake, schedule, id=loop.name)
        loop.start()
    _keep_heartbeat(clock, loops)
    stopper = Stopper(asked, clock)
    stopper.start()

    def started(_event: object) -> None:
        stopper.running.set()
        ready()
        tell_supervisor("READY=1", "STATUS=keeps the timetable")
        log.info("scheduler ready", scheduler=identity())

    timetable = {name: str(settings.cron(name) or "off") for name in BATCHES}
    heartbeat = Heartbeat("scheduler", dead_after=settings.dead_after, facts=lambda: {"timetable": timetable})
    heartbeat.start()
    log.info("scheduler started", scheduler=identity(), batches=sorted(BATCHES))
    clock.add_listener(started, EVENT_SCHEDULER_STARTED)
    clock.start()
    _end(loops, heartbeat, within=min(TURN_CUT, settings.shutdown_timeout).total_seconds())
    log.info("scheduler stopped", scheduler=identity())
    return 1 if broken.is_set() or ended_itself() else 0


def _end(loops: list[Loop], heartbeat: Heartbeat, *, within: float) -> None:
    """Wait for the current turns to end, for *within* seconds in all."""
    ends = monotonic() + within
    for loop in loops:
        loop.stop()
    heartbeat.stop(within=within)
    for loop in loops:
        loop.join(max(0.0, ends - monotonic()))
    if cut := [loop.name for loop in loops if loop.is_alive()]:
        log.warning("turns cut off, the next scheduler goes on from there", batches=cut)


def _keep_heartbeat(clock: BlockingScheduler, loops: list[Loop]) -> None:
    """Let the clock set the gauges of its heartbeat and of each batch's next tick.

    If a loop gets no answer, the timetable is not kept although the clock runs: then the heartbeat is as old as the
    loop's first unanswered turn.
    """

    def heartbeat() -> None:
        for batch in BATCHES:
            job = clock.get_job(batch)
            due = job.next_run_time.timestamp() if job and job.next_run_time else 0
            COUNT.set("forgekeeper_scheduler_next_run_timestamp_seconds", batch, to=due)
        last = current_millis() / 1000 - max(loop.stands_still for loop in loops)
        COUNT.set("forgekeeper_scheduler_heartbeat_timestamp_seconds", to=last)

    clock.add_job(heartbeat, "interval", seconds=HEARTBEAT.total_seconds(), id="heartbeat")
    clock.add_listener(lambda _event: heartbeat(), EVENT_SCHEDULER_STARTED)
