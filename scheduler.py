"""The timetable, and the process that keeps it.

Any number of schedulers run side by side, without a leader.  APScheduler and a look at all batches every few seconds
only wake the loop of a batch; `forgekeeper.ledger.reconcile` decides which ticks are due.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
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
from forgekeeper.ledger.batches_to_reconcile import find_batches_to_reconcile
from forgekeeper.ledger.heartbeats import Heartbeat
from forgekeeper.ledger.reconcile import SCHEDULER_COUNTERS, reconcile_batch
from forgekeeper.platform.connections import process_identity
from forgekeeper.platform.database import database, release_connection
from forgekeeper.platform.failpoints import arm_failpoints
from forgekeeper.platform.settings import Settings
from metrics.catalogue import build_metrics
from metrics.logs import describe_error
from metrics.supervisor import start_watchdog, tell_supervisor
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
    """Reconciles one batch at its start and whenever it is woken."""

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
        self.has_failed = False
        """Whether the last turn failed; the next look wakes the loop then, whatever it finds."""

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
        self.start_turn()

    def start_turn(self) -> None:
        """Start a turn now, or after the current turn."""
        self._woken.set()

    def stop(self) -> None:
        """End after the current turn."""
        self.stopped.set()
        self._woken.set()

    def run_until_stopped(self) -> None:
        """Reconcile until stopped."""
        pause = min(RETRY_PAUSE_SECONDS, self._settings.poll_interval.total_seconds())
        try:
            while not self.stopped.is_set():
                self._woken.wait(None if self.take_turn(self.reconcile_once) else pause)
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
        self.has_failed = True
        try:
            database.connect(reuse_if_open=True)
            due_hint, self._due_hint = self._due_hint, None
            reconcile_batch(self.name, self._settings, enqueue_run, by=process_identity(), due_hint=due_hint)
            self._unanswered, self.has_failed = None, False
        except BaseException as error:
            SCHEDULER_COUNTERS.inc("forgekeeper_scheduler_enqueue_failures_total", self.name)
            release_connection()
            if isinstance(error, UNREADABLE_ROW_ERRORS):
                self._unanswered = None
            elif not isinstance(error, (pw.PeeweeException, redis.RedisError)):
                raise
            log.warning("reconcile failed", batch=self.name, error=describe_error(error))


class BatchWatch(CriticalThread):
    """Looks at all batches every few seconds and wakes the loops of those that need a turn.

    If the look fails, all loops take a turn.  The monotonic clock measures the pause between two looks: if the wall
    clock is set back by an hour, APScheduler is silent for an hour, but a tick is only seconds late.
    """

    def __init__(self, loops: Sequence[BatchLoop], settings: Settings) -> None:
        super().__init__("watch")
        self._loops = loops
        self._settings = settings

    @property
    def unanswered_seconds(self) -> float:
        """The seconds since the current look began, 0 between two looks."""
        began = self.turn_began
        return 0.0 if began is None else monotonic() - began

    def run_until_stopped(self) -> None:
        """Look until stopped."""
        try:
            while not self.stopped.wait(self._settings.poll_interval.total_seconds()):
                self.take_turn(self.wake_loops)
        finally:
            release_connection()

    def wake_loops(self) -> None:
        """Wake the loops of batches that need a turn, and loops whose last turn failed."""
        needed = {loop.name for loop in self._loops}
        try:
            database.connect(reuse_if_open=True)
            needed = find_batches_to_reconcile(needed, self._settings)
        except BaseException as error:
            release_connection()
            if not isinstance(error, (pw.PeeweeException, *UNREADABLE_ROW_ERRORS)):
                raise
            log.warning("look at batches failed, each takes a turn", error=describe_error(error))
        finally:
            for loop in self._loops:
                if loop.name in needed or loop.has_failed:
                    loop.start_turn()


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
    watch = BatchWatch(loops, settings)
    watch.start()
    _keep_heartbeat(clock, [*loops, watch])
    stopper = Stopper(stop_requests, clock)
    stopper.start()

    def report_start(_event: object) -> None:
        stopper.running.set()
        on_ready()
        start_watchdog()
        tell_supervisor("READY=1", "STATUS=schedules batches")
        log.info("scheduler ready", scheduler=process_identity())

    timetable = {name: str(settings.schedule_of(name) or "off") for name in BATCHES}
    heartbeat = Heartbeat("scheduler", dead_after=settings.dead_after, facts=lambda: {"timetable": timetable})
    heartbeat.start()
    log.info("scheduler started", scheduler=process_identity(), batches=sorted(BATCHES))
    clock.add_listener(report_start, EVENT_SCHEDULER_STARTED)
    clock.start()
    watch.stopped.set()
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


def _keep_heartbeat(clock: BlockingScheduler, loops: Sequence[BatchLoop | BatchWatch]) -> None:
    """Let the clock set the gauges of its heartbeat and of each batch's next tick.

    If a loop or the look gets no answer, the timetable is not kept although the clock runs: then the heartbeat is as
    old as the first unanswered turn.
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
