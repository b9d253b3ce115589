"""The end of a worker process: what it is at may go on for a while, and then it ends, whatever hangs.

Dramatiq's own end waits for its threads, and they wait for servers: for a Redis that is away
to take an acknowledgement, for as long as it is away.  Whatever such a thread still has in
hand is safe without it: a run whose row stays open is found dead, a message is reclaimed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any, NoReturn

import redis
import structlog
from dramatiq import Broker, MessageProxy, Worker
from dramatiq.common import q_name
from dramatiq.middleware import Middleware

from forgekeeper import shutdown
from forgekeeper.boot import load
from forgekeeper.delivery.broker import Broker as OurBroker
from forgekeeper.identity import identity
from forgekeeper.process import signals
from forgekeeper.process.middleware import needed
from forgekeeper.process.ready import Mark, tell_supervisor
from metrics.redaction import describe
from metrics.threads import Thread

SOON = 2.0
"""Seconds in which a process that is at nothing any more ends by itself; one whose servers are away does not."""
LAST_WORDS = 1.2
"""Seconds for what a process tries last: less than servers that are away would take."""
TIME_UP = 1
"""The status of a process that was still at something when its time was up."""

log = structlog.get_logger(__name__)


def reserve(shutdown_timeout: timedelta) -> float:
    """Return how many of those seconds a worker's processes leave to their master, and to their own last words."""
    return min(3.0, shutdown_timeout.total_seconds() / 2)


class Drain(Middleware):
    """Knows what the threads of this process are at, and ends it when a drain takes too long.

    A thread is at a message until that is acknowledged.
    """

    def __init__(self) -> None:
        self._busy: dict[int, tuple[str, str, float]] = {}
        self._idle_since = 0.0
        self._threads: list[Any] = []
        self._mark: Mark | None = None

    @needed
    def after_process_boot(self, broker: Broker) -> None:
        """Begin to wait for the drain."""
        assert isinstance(broker, OurBroker)
        self._busy.clear()
        Thread(partial(self._watch, broker, load().shutdown_timeout), "drain").start()

    def after_worker_boot(self, broker: Broker, worker: Worker) -> None:
        """Get to know the threads, and say that they are there."""
        self._threads = worker.workers
        if shutdown.requested.is_set():
            return
        self._mark = Mark()
        self._mark.set()
        queues = sorted({q_name(queue) for queue in worker.consumers})
        tell_supervisor("READY=1", f"STATUS=at work on {', '.join(queues)}")
        log.info("worker ready", worker=identity(), queues=queues, threads=len(self._threads))

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Note that this thread is at it; what a drain lets nobody start does not come here."""
        self._busy[get_ident()] = message.actor_name, message.message_id, time.monotonic()

    def after_ack(self, broker: Broker, message: MessageProxy) -> None:
        """Note that this thread is at nothing."""
        self._leave()

    def after_nack(self, broker: Broker, message: MessageProxy) -> None:
        """Note that this thread is at nothing."""
        self._leave()

    def _leave(self) -> None:
        self._busy.pop(get_ident(), None)
        self._idle_since = time.monotonic()

    def _watch(self, broker: OurBroker, allowed: timedelta) -> None:
        """End the process when its time is up, or when it is idle and does not end; in a thread of its own."""
        shutdown.requested.wait()
        broker.doorbell.stop()
        self._idle_since = max(self._idle_since, time.monotonic())
        time_up = time.monotonic() + allowed.total_seconds() - reserve(allowed)
        soon = min(SOON, reserve(allowed))
        # Dramatiq's main thread does this up to a second later.
        for thread in self._threads:
            thread.stop()
        if self._mark is not None:
            self._mark.clear()
        while time.monotonic() < time_up:
            if not self._busy and time.monotonic() > self._idle_since + soon:
                log.warning("worker ends although threads wait for servers")
                _end(broker, status=0)
            time.sleep(0.05)
        now = time.monotonic()
        at_work = [
            {"what": actor, "message_id": message_id, "seconds": round(now - began, 3)}
            for actor, message_id, began in list(self._busy.values())
        ]
        if not at_work:
            _end(broker, status=0)
        _end(broker, status=TIME_UP, tell=lambda: log.critical("shutdown timed out", at_work=at_work))


def _end(broker: OurBroker, *, status: int, tell: Callable[[], None] = lambda: None) -> NoReturn:
    """Try what is left to be tried, for a moment, and end the process.

    Not by an exception or a signal: the main thread waits for the others, and a thread in a call
    into C, into libpq say, hears of neither.  What is skipped is what a fork of Dramatiq's
    master skips anyway: no exit handler runs in one.  Its files of metrics are added up by the
    page's process, its sockets are the kernel's to close.
    """

    def last_words() -> None:
        tell()
        _end_programs()
        _attempt(partial(requeue_all, broker), *signals.at_last)

    with suppress(RuntimeError, MemoryError):  # no thread can be had: the end is not put off for that
        thread = Thread(last_words, "last words", timeout=LAST_WORDS)
        thread.start()
        thread.join(LAST_WORDS)
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(status)


def _attempt(*steps: Callable[[], None]) -> None:
    """Take the steps beside one another: each may wait for a server of its own, and hang."""
    threads = [Thread(step, timeout=LAST_WORDS) for step in steps]
    for thread in threads:
        with suppress(RuntimeError, MemoryError):
            thread.start()
    ends = time.monotonic() + LAST_WORDS
    for thread in filter(Thread.is_alive, threads):
        thread.join(max(0.0, ends - time.monotonic()))


def requeue_all(broker: OurBroker) -> None:
    """Requeue all that this process has in hand, started or not.

    Others may begin at once.  Their starts are forgotten, for it is not these messages that end the
    process; after three deployments a long one would be taken for poison.
    """
    try:
        for queue, ids in broker.in_hand().items():
            broker.deliveries.requeue(queue, ids)
    except redis.RedisError as error:
        log.warning("messages not requeued", error=describe(error))


def _end_programs() -> None:
    """Let every git that we have started end, and clean up after itself."""
    for pid in _children():
        with suppress(ProcessLookupError, PermissionError):
            # Each leads a session of its own.
            os.killpg(pid, signal.SIGTERM)


def _children() -> Iterable[int]:
    for listed in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            yield from map(int, listed.read_text().split())
