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
from forgekeeper.delivery.messages import enqueue_run
from forgekeeper.ledger.heartbeats import Heartbeat
from forgekeeper.ledger.reconcile import SCHEDULER_COUNTERS, reconcile_batch
from forgekeeper.platform.connections import process_identity
from forgekeeper.platform.database import database, release_connection
from forgekeeper.platform.failpoints import arm_failpoints
from forgekeeper.platform.readiness import tell_supervisor
from forgekeeper.platform.settings import Settings
from metrics.catalogue import build_metrics
from metrics.logs import describe_error
from metrics.threads import CriticalThread, ended_itself

HEARTBEAT_INTERVAL = timedelta(seconds=15)
RETRY_PAUSE_SECONDS = 1.0
"""Pause in seconds after a turn that failed although no server was down."""
SHUTDOWN_TURN_LIMIT = timedelta(seconds=3)
"""Time limit for all loops to finish their current turn during shutdown.  Interrupting a turn is harmless."""
UNREADABLE_ROW_ERRORS = (ValueError, ArithmeticError, RecursionError)
"""Errors of reading a row with a timestamp or a document that no process of ours has written."""

log = structlog.get_logger(__name__)


class BatchLoop(CriticalThread):
    """Reconciles one batch when it is woken, and every few seconds.

    The monotonic clock measures the pause between two turns: if the wall clock is set back by an hour, APScheduler is
    silent for an hour, but a tick is only seconds late.
    """

    def __init__(
        self, batch: BatchSpec, settings: Settings, *, broken: threading.Event, stop_requests: SimpleQueue[None]
    ) -> None:
        super().__init__(batch.name)
        self._woken = threading.Event()
        self._due_hint: datetime | None = None
        self._settings = settings
        self._broken = broken
        self._stop_requests = stop_requests
        self._unanswered: float | None = None

    @property
    def unanswered_seconds(self) -> float:
        """The seconds since the first of a series of failed turns began, 0 after a success."""
        since = self._unanswered
        return 0.0 if since is None else monotonic() - since

    def wake(self) -> None:
        """Start a turn now; APScheduler calls this when a tick is due by this machine's clock."""
        schedule = self._settings.schedule_of(self.name)
        if schedule is not None:
            self._due_hint = schedule.latest_until(datetime.fromtimestamp(current_millis() / 1000, UTC))
        self._woken.set()

    def stop(self) -> None:
        """End after the current turn."""
        self.stopped.set()
        self._woken.set()

    def run_until_stopped(self) -> None:
        """Reconcile until stopped."""
        pause = self._settings.poll_interval.total_seconds()
        try:
            while not self.stopped.is_set():
                self._woken.wait(pause if self.take_turn(self.reconcile_once) else min(RETRY_PAUSE_SECONDS, pause))
                self._woken.clear()
        finally:
            release_connection()

    def handle_early_end(self, error: BaseException | None) -> None:
        """End the process: a scheduler without this loop is worse than none."""
        self._broken.set()
        self._stop_requests.put(None)
        log.critical("process ends itself", reason=f"loop {self.name!r} has ended", exc_info=error)

    def reconcile_once(self) -> None:
        """Reconcile once; if a server is down or a row unreadable, only this turn fails."""
        if self._unanswered is None:
            self._unanswered = monotonic()
        try:
            database.connect(reuse_if_open=True)
            due_hint, self._due_hint = self._due_hint, None
            reconcile_batch(self.name, self._settings, enqueue_run, by=process_identity(), due_hint=due_hint)
            self._unanswered = None
        except BaseException as error:
            SCHEDULER_COUNTERS.inc("forgekeeper_scheduler_enqueue_failures_total", self.name)
            release_connection()
            if not isinstance(error, (pw.PeeweeException, redis.RedisError, *UNREADABLE_ROW_ERRORS)):
                raise
            log.warning("reconcile failed", batch=self.name, error=describe_error(error))


class Stopper(CriticalThread):
    """Shuts the clock down on a request in *stop_requests*; without it no signal ends the process."""

    def __init__(self, stop_requests: SimpleQueue[None], clock: BlockingScheduler) -> None:
        super().__init__("stopper")
        self.running = threading.Event()
        self._stop_requests = stop_requests
        self._clock = clock

    def run_until_stopped(self) -> None:
        """Wait for a request, and until the clock runs: it cannot be shut down earlier."""
        self._stop_requests.get()
        self.running.wait()
        while not self.take_turn(partial(self._clock.shutdown, wait=False)):
            pass
        self.stopped.set()


def keep_timetable(settings: Settings, *, stop_requests: SimpleQueue[None], on_ready: Callable[[], None]) -> int:
    """Keep the timetable until a signal arrives in *stop_requests*; return the exit status.

    *on_ready* is called when the timetable is kept.  If a loop breaks, the process ends with status 1, and its
    supervisor restarts it: a scheduler that continues without one of its batches would be worse.
    """
    SCHEDULER_COUNTERS.declare_metrics(build_metrics(all_declared())).create_all_series()
    arm_failpoints(settings.failpoints)
    # A job only sets an event or a few gauges: it needs no thread of its own.
    clock = BlockingScheduler(
        timezone="UTC",
        executors={"default": DebugExecutor()},
        job_defaults={"misfire_grace_time": None, "coalesce": True},
    )
    broken = threading.Event()
    loops = [BatchLoop(batch, settings, broken=broken, stop_requests=stop_requests) for batch in BATCHES.values()]
    for loop in loops:
        schedule = settings.schedule_of(loop.name)
        if schedule is not None:
            clock.add_job(loop.wake, schedule, id=loop.name)
        loop.start()
    _keep_heartbeat(clock, loops)
    stopper = Stopper(stop_requests, clock)
    stopper.start()

    def report_start(_event: object) -> None:
        stopper.running.set()
        on_ready()
        tell_supervisor("READY=1", "STATUS=schedules batches")
        log.info("scheduler ready", scheduler=process_identity())

    timetable = {name: str(settings.schedule_of(name) or "off") for name in BATCHES}
    heartbeat = Heartbeat("scheduler", dead_after=settings.dead_after, facts=lambda: {"timetable": timetable})
    heartbeat.start()
    log.info("scheduler started", scheduler=process_identity(), batches=sorted(BATCHES))
    clock.add_listener(report_start, EVENT_SCHEDULER_STARTED)
    clock.start()
    _stop_loops(loops, heartbeat, within=min(SHUTDOWN_TURN_LIMIT, settings.shutdown_timeout).total_seconds())
    log.info("scheduler stopped", scheduler=process_identity())
    return 1 if broken.is_set() or ended_itself() else 0


def _stop_loops(loops: list[BatchLoop], heartbeat: Heartbeat, *, within: float) -> None:
    """Wait for the current turns to end, for *within* seconds in all."""
    ends = monotonic() + within
    for loop in loops:
        loop.stop()
    heartbeat.stop(within=within)
    for loop in loops:
        loop.join(max(0.0, ends - monotonic()))
    if cut := [loop.name for loop in loops if loop.is_alive()]:
        log.warning("turns interrupted, the next scheduler continues", batches=cut)


def _keep_heartbeat(clock: BlockingScheduler, loops: list[BatchLoop]) -> None:
    """Let the clock set the gauges of its heartbeat and of each batch's next tick.

    If a loop gets no answer, the timetable is not kept although the clock runs: then the heartbeat is as old as the
    loop's first unanswered turn.
    """

    def set_gauges() -> None:
        for batch in BATCHES:
            job = clock.get_job(batch)
            due = job.next_run_time.timestamp() if job and job.next_run_time else 0
            SCHEDULER_COUNTERS.set("forgekeeper_scheduler_next_run_timestamp_seconds", batch, to=due)
        last = current_millis() / 1000 - max(loop.unanswered_seconds for loop in loops)
        SCHEDULER_COUNTERS.set("forgekeeper_scheduler_heartbeat_timestamp_seconds", to=last)

    clock.add_job(set_gauges, "interval", seconds=HEARTBEAT_INTERVAL.total_seconds(), id="heartbeat")
    clock.add_listener(lambda _event: set_gauges(), EVENT_SCHEDULER_STARTED)
