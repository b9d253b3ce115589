"""The heartbeat of a worker process: one thread that keeps its messages its own, and reclaims those of the dead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

import redis
import structlog
from dramatiq import Worker

from forgekeeper import shutdown
from forgekeeper.delivery.deliveries import Deliveries
from forgekeeper.delivery.queues import actor_of
from metrics.counting import dead_lettered
from metrics.redaction import describe
from metrics.threads import Vital, end_process

LONGEST_INTERVAL = timedelta(seconds=2.5)
"""With it, and with an idle consumer's second, a message runs again within 20 s of its worker's death by default."""
LOG_EVERY = timedelta(minutes=1)

log = structlog.get_logger(__name__)


class WorkerHeartbeat(Vital):
    """Says that the process lives, reclaims messages of expired workers, requeues at a drain, ends a crippled process.

    It goes on through the drain: the last message may take long.
    """

    def __init__(
        self,
        deliveries: Deliveries,
        worker: Worker,
        *,
        queues: Iterable[str],
        dead_after: timedelta,
        threads: Iterable[threading.Thread] = (),
        overdue: Callable[[], list[str]] = list,
    ) -> None:
        super().__init__("worker heartbeat")
        self._deliveries = deliveries
        self._worker = worker
        self._queues = tuple(queues)
        self._threads = tuple(threads)
        self._overdue = overdue
        self._dead_after = dead_after
        self._interval = min(dead_after / 6, LONGEST_INTERVAL).total_seconds()
        self._requeued = False
        # Redis may have been away until now, and everybody's heartbeat be old.  Those who live give one meanwhile.
        self._trusts_from = time.monotonic() + 3 * self._interval
        self._logs_from = 0.0

    def stop(self) -> None:
        """End the thread: the worker's are gone."""
        self.stopped.set()

    def work(self) -> None:
        """Say that it lives until stopped."""
        while not self.stopped.is_set():
            self.take_turn(self._turn)
            interrupt = self.stopped if self._requeued else shutdown.requested
            interrupt.wait(self._interval)

    def _turn(self) -> None:
        if not shutdown.requested.is_set():
            self._look_after_threads()
        try:
            if shutdown.requested.is_set() and not self._requeued:
                self._requeue_unstarted()
            if time.monotonic() >= self._trusts_from:
                self._reclaim()
            else:
                self._deliveries.heartbeat()
        except redis.RedisError as error:
            log.warning("worker heartbeat failed", error=describe(error))
            # Everybody's heartbeats are missing now.  Those who live need time to give one.
            self._trusts_from = time.monotonic() + self._dead_after.total_seconds()
            self.stopped.wait(self._interval)

    def _requeue_unstarted(self) -> None:
        count = sum(self._deliveries.requeue_unstarted(queue) for queue in self._worker.consumers)
        self._requeued = True
        log.info("messages requeued", count=count)

    def _reclaim(self) -> None:
        found = self._deliveries.reclaim(self._queues, dead_after=self._dead_after, failed=self._not_reclaimed)
        for reclaimed in found:
            log.warning("messages reclaimed", silent=reclaimed.worker, queue=reclaimed.queue, count=reclaimed.taken)
            for message_id, body in zip(reclaimed.poison, reclaimed.bodies, strict=True):
                log.error("message dead-lettered", queue=reclaimed.queue, message_id=message_id, reason="poison")
                dead_lettered(actor_of(body))

    def _not_reclaimed(self, worker: str, error: redis.ResponseError) -> None:
        """Say once a minute that messages cannot be taken, for as long as that is so."""
        if time.monotonic() >= self._logs_from:
            self._logs_from = time.monotonic() + LOG_EVERY.total_seconds()
            log.error("messages not reclaimed", silent=worker, error=describe(error))

    def _look_after_threads(self) -> None:
        threads = [*self._worker.workers, *self._worker.consumers.values(), *self._threads]
        # Not what each says of itself: one that was made before the fork says for ever that it has stopped.
        alive = set(threading.enumerate())
        dead = [thread.name for thread in threads if thread not in alive]
        if dead:
            end_process("a thread has died", threads=dead)
        elif stuck := self._overdue():
            # A thread that waits in C hears of no time limit, and keeps what was fetched for it.
            end_process("its time limit has not ended a message", messages=stuck)
