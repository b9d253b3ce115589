"""The pulse of a worker process: one thread that keeps its messages its own, and saves those of the dead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

import redis
import structlog
from dramatiq import Worker

from forgekeeper import shutdown, worker_metrics
from forgekeeper.delivery.deliveries import Deliveries
from forgekeeper.delivery.queues import actor_of
from forgekeeper.runs.attempt import describe
from metrics.threads import Vital, end_process

LONGEST_INTERVAL = timedelta(seconds=2.5)
"""With it, and with an idle consumer's second, a message runs again within 20 s of its worker's death by default."""
TELLS_EVERY = timedelta(minutes=1)

log = structlog.get_logger(__name__)


class Pulse(Vital):
    """Gives signs of life, rescues the messages of silent workers, hands back at a drain, ends a crippled process.

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
        super().__init__("pulse")
        self._deliveries = deliveries
        self._worker = worker
        self._queues = tuple(queues)
        self._threads = tuple(threads)
        self._overdue = overdue
        self._dead_after = dead_after
        self._interval = min(dead_after / 6, LONGEST_INTERVAL).total_seconds()
        self._handed_back = False
        # Redis may have been away until now, and everybody's signs be old.  Those who live give one meanwhile.
        self._trusts_from = time.monotonic() + 3 * self._interval
        self._tells_from = 0.0

    def stop(self) -> None:
        """End the thread: the worker's are gone."""
        self.stopped.set()

    def work(self) -> None:
        """Beat until stopped."""
        while not self.stopped.is_set():
            self.take_turn(self._turn)
            interrupt = self.stopped if self._handed_back else shutdown.requested
            interrupt.wait(self._interval)

    def _turn(self) -> None:
        if not shutdown.requested.is_set():
            self._look_after_threads()
        try:
            if shutdown.requested.is_set() and not self._handed_back:
                self._hand_back()
            self._deliveries.beat()
            if time.monotonic() >= self._trusts_from:
                self._rescue()
        except redis.RedisError as error:
            log.warning("pulse failed", error=describe(error))
            # Everybody's signs of life are missing now.  Those who live need time to give one.
            self._trusts_from = time.monotonic() + self._dead_after.total_seconds()
            self.stopped.wait(self._interval)

    def _hand_back(self) -> None:
        count = sum(self._deliveries.hand_back(queue) for queue in self._worker.consumers)
        self._handed_back = True
        log.info("messages handed back", count=count)

    def _rescue(self) -> None:
        for rescued in self._deliveries.rescue(self._queues, dead_after=self._dead_after, failed=self._not_rescued):
            log.warning("messages rescued", silent=rescued.worker, queue=rescued.queue, count=rescued.taken)
            for message_id, body in zip(rescued.poison, rescued.bodies, strict=True):
                log.error("message given up", queue=rescued.queue, message_id=message_id, reason="poison")
                worker_metrics.given_up(actor_of(body))

    def _not_rescued(self, silent: str, error: redis.ResponseError) -> None:
        """Say once a minute that messages cannot be taken, for as long as that is so."""
        if time.monotonic() >= self._tells_from:
            self._tells_from = time.monotonic() + TELLS_EVERY.total_seconds()
            log.error("messages not rescued", silent=silent, error=describe(error))

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
