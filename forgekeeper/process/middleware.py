"""What a worker process owns from its fork to its end: its clients, its messages, its place among the others."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import partial, wraps
from threading import Thread
from typing import Any, ParamSpec

import structlog
from dramatiq import Broker, MessageProxy, Worker
from dramatiq.common import q_name
from dramatiq.middleware import Middleware, MiddlewareError, SkipMessage, TimeLimit

from forgekeeper import shutdown
from forgekeeper.batches import queues as declared_queues
from forgekeeper.boot import load
from forgekeeper.connections import Limits, connect
from forgekeeper.delivery.broker import Broker as OurBroker
from forgekeeper.delivery.consumer import is_counted
from forgekeeper.delivery.hands import Delivery
from forgekeeper.delivery.queues import RUN
from forgekeeper.delivery.worker_heartbeat import WorkerHeartbeat
from forgekeeper.identity import identity
from forgekeeper.process import signals
from forgekeeper.process.actors import RUN_ID
from forgekeeper.process.presence import AtWork, Presence
from metrics import logs
from metrics.counting import line_written
from metrics.redaction import describe

LIMIT_LATE = 60.0
"""Seconds after which a time limit that has not ended its message will not."""

Given = ParamSpec("Given")

log = structlog.get_logger(__name__)


def needed(hook: Callable[Given, None]) -> Callable[Given, None]:
    """Let the process end where *hook* fails: Dramatiq would swallow that, and go on with half a process."""

    @wraps(hook)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> None:
        try:
            hook(*args, **kwargs)
        except Exception as error:
            log.critical("process ends itself", reason="it cannot start", exc_info=error)
            raise SystemExit(1) from error

    return called


def _longest(broker: Broker) -> dict[str, float]:
    """Return for how many seconds a message of each actor may be worked on, until nothing will end it any more."""
    limits = {name: actor.options.get("time_limit") for name, actor in broker.actors.items()}
    return {name: limit / 1000 + LIMIT_LATE for name, limit in limits.items() if limit is not None}


class HookingBroker(OurBroker):
    """Our broker, which calls the hooks that do something: on a message's way Dramatiq calls forty, most of them empty.

    That is worth 8 microseconds a message, and 4 for each that is put in.
    """

    def __init__(self, **options: Any) -> None:
        self._known: dict[str, tuple[list[Middleware], list[Callable[..., None]]]] = {}
        super().__init__(**options)

    def emit_before(self, signal: str, *args: Any, **kwargs: Any) -> None:
        """Call the hooks of before; a `MiddlewareError` ends that, what else one raises is said."""
        for hook in self._hooks("before_" + signal):
            try:
                hook(self, *args, **kwargs)
            except MiddlewareError:
                raise
            except Exception:
                self.logger.critical("Unexpected failure in %r.", hook, exc_info=True)

    def emit_after(self, signal: str, *args: Any, **kwargs: Any) -> None:
        """Call the hooks of after, in reverse order."""
        for hook in reversed(self._hooks("after_" + signal)):
            try:
                hook(self, *args, **kwargs)
            except Exception:
                self.logger.critical("Unexpected failure in %r.", hook, exc_info=True)

    def _hooks(self, name: str) -> list[Callable[..., None]]:
        """Return the hooks of that name that are not Dramatiq's empty ones."""
        known, found = self._known.get(name, ([], []))
        if known != self.middleware:
            empty = getattr(Middleware, name)
            every = [getattr(middleware, name) for middleware in self.middleware]
            found = [hook for hook in every if getattr(hook, "__func__", hook) is not empty]
            self._known[name] = list(self.middleware), found
        return found


class Clients(Middleware):
    """Connects each worker process after its fork, and asks its runs to stop when it drains."""

    @needed
    def after_process_boot(self, broker: Broker) -> None:
        """Point this process at its servers."""
        signals.follow()
        settings = load()
        # Not what Dramatiq has put in its place: a pipe to the master, in whose death lines would be lost.
        logs.configure(settings.log_format, settings.log_level, sys.__stderr__, on_line=line_written)
        # One connection for each thread, one for the heartbeat of runs, one for the process's presence.
        connect(settings, Limits.of_worker(settings), name="worker", connections=settings.worker_threads + 2)
        # What was imported stays.  Looking at all of it in each full collection took up to half of a fan-out.
        gc.freeze()

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        """Let every run end at its next safe point."""
        log.info("worker draining", worker=identity())
        # A signal has done so, unless it came before we followed them.
        if not shutdown.requested.is_set():
            shutdown.requested.set()


class Holding(Middleware):
    """Keeps this process's hold on its messages, and says of each when it starts.

    A start that never ends is a death that the message is made to answer for.  Where a thread had its next message
    when it ended the one before, the start is noted already: with that end, in one step.
    """

    def __init__(self, at_work: AtWork | None = None) -> None:
        self._at_work = at_work or AtWork()
        self._heartbeat: WorkerHeartbeat | None = None

    @needed
    def after_process_boot(self, broker: Broker) -> None:
        """Make this process a worker of its own, among those that are found expired."""
        assert isinstance(broker, OurBroker)
        broker.enrol()

    @needed
    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        """Let its threads take their next messages when they end others; it has none yet."""
        assert isinstance(broker, OurBroker)
        worker.work_queue = broker.work_queue

    @needed
    def after_worker_boot(self, broker: Broker, worker: Worker) -> None:
        """Start the heartbeat."""
        assert isinstance(broker, OurBroker)
        queues = {*declared_queues(), *broker.get_declared_queues()}
        # A thread of Dramatiq's own, without which a run that hangs does so for ever.
        managers = [one.manager for one in broker.middleware if isinstance(one, TimeLimit)]
        limits = [manager for manager in managers if isinstance(manager, Thread)]
        self._heartbeat = WorkerHeartbeat(
            *(broker.deliveries, worker),
            queues=queues,
            dead_after=load().dead_after,
            threads=limits,
            overdue=partial(self._at_work.overdue, _longest(broker)),
        )
        self._heartbeat.start()
        broker.doorbell.listen(worker.consumers)

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        """Wake the idle threads: they are to end."""
        assert isinstance(broker, OurBroker)
        broker.work_queue.end()
        broker.doorbell.stop()

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        """Stop the heartbeat: nothing is in hand any more."""
        assert self._heartbeat is not None
        self._heartbeat.stop()

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Note the start; skip a message that was taken from us, or that a drain lets nobody start."""
        assert isinstance(broker, OurBroker)
        assert isinstance(message, Delivery)
        try:
            ours = not shutdown.requested.is_set() and self._noted(broker, message)
        except Exception as error:  # noqa: BLE001, Dramatiq would swallow it, and go on without a word of ours
            # It is ours as far as anybody knows; not to work at all would be worse than not to count.
            log.warning("start not noted", message_id=message.message_id, error=describe(error))
            return
        if not ours:
            message.unstarted = True
            raise SkipMessage

    def _noted(self, broker: OurBroker, message: Delivery) -> bool:
        if message.noted is not None:
            return message.noted
        return broker.deliveries.start(message.queue_name, message.fetched.id, counted=is_counted(broker, message))


class Attendance(Middleware):
    """Says in the ledger's database that this process lives, which queues it has, and what its threads are at."""

    def __init__(self, at_work: AtWork) -> None:
        self._at_work = at_work
        self._presence: Presence | None = None

    @needed
    def after_worker_boot(self, broker: Broker, worker: Worker) -> None:
        """Begin the heartbeats of its row."""

        def said() -> dict[str, Any]:
            queues = sorted({q_name(queue) for queue in worker.consumers})
            return {"queues": queues, "draining": shutdown.requested.is_set(), "at_work": self._at_work.facts()}

        self._presence = Presence("worker", dead_after=load().dead_after, say=said)
        self._presence.start()
        signals.at_last.append(self._presence.stop)

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        """Say that it drains."""
        assert self._presence is not None
        self._presence.wake()

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        """End in an orderly way: the row goes."""
        assert self._presence is not None
        self._presence.stop()

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Note what this thread is at, and since when."""
        actor = broker.actors.get(message.actor_name)
        is_run = actor is not None and "document" in actor.options
        run = str(message.message_id if is_run else message.options.get(RUN))
        self._at_work.begin(message.actor_name, message.message_id, run=int(run) if RUN_ID.fullmatch(run) else None)

    def after_process_message(
        self,
        broker: Broker,
        message: MessageProxy,
        *,
        result: Any | None = None,
        exception: BaseException | None = None,
    ) -> None:
        """Note that this thread is at nothing."""
        self._at_work.end()

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        """Note that this thread is at nothing."""
        self._at_work.end()
