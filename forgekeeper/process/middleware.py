"""What every message passes through: clients, a connection, and the life of its run."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial, wraps
from threading import Thread, get_ident
from typing import Any, ParamSpec
from uuid import UUID

import peewee as pw
import structlog
from dramatiq import Broker, MessageProxy, Worker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import q_name
from dramatiq.middleware import Middleware, MiddlewareError, Retries, SkipMessage, TimeLimit
from playhouse.pool import MaxConnectionsExceeded

from forgekeeper import shutdown
from forgekeeper.batches import queues as declared_queues
from forgekeeper.boot import load
from forgekeeper.connections import Limits, connect
from forgekeeper.database import database, release
from forgekeeper.delivery.broker import Broker as OurBroker
from forgekeeper.delivery.enqueue_unique import TOKEN, enqueue_unique
from forgekeeper.delivery.hands import Delivery
from forgekeeper.delivery.worker_heartbeat import WorkerHeartbeat
from forgekeeper.events import LineWritten, emit
from forgekeeper.identity import identity
from forgekeeper.process import signals
from forgekeeper.process.presence import AtWork, Presence
from forgekeeper.process.tracing import HEADER
from forgekeeper.runs.attempt import RUN, Attempt
from forgekeeper.runs.child import Child
from forgekeeper.runs.runner import Runner
from forgekeeper.settings import Settings
from metrics import logs
from metrics.redaction import describe

ORIGIN = {RUN, HEADER}
"""What a message's options say of where it comes from."""
RUN_ID = re.compile("[1-9][0-9]{0,17}")
"""How a row's number is written; one digit more might be beyond PostgreSQL's bigint."""

LIMIT_LATE = 60.0
"""Seconds after which a time limit that has not ended its message will not."""

Given = ParamSpec("Given")

log = structlog.get_logger(__name__)


class NotReady(MiddlewareError):
    """The message cannot be worked on now; Dramatiq swallows other errors of a hook and goes on."""


class NoRun(MiddlewareError):
    """The message is of a batch and names no run; nothing will ever change that."""


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


def _written(level: str) -> None:
    emit(LineWritten(level))


def _longest(broker: Broker) -> dict[str, float]:
    """Return for how many seconds a message of each actor may be worked on, until nothing will end it any more."""
    limits = {name: actor.options.get("time_limit") for name, actor in broker.actors.items()}
    return {name: limit / 1000 + LIMIT_LATE for name, limit in limits.items() if limit is not None}


class Clients(Middleware):
    """Connects each worker process after its fork, and asks its runs to stop when it drains."""

    @needed
    def after_process_boot(self, broker: Broker) -> None:
        """Point this process at its servers."""
        signals.follow()
        settings = load()
        # Not what Dramatiq has put in its place: a pipe to the master, in whose death lines would be lost.
        logs.configure(settings.log_format, settings.log_level, sys.__stderr__, told=_written)
        # One connection for each thread, one for the heartbeat of runs, one for the process's presence.
        connect(settings, Limits.of_worker(settings), name="worker", connections=settings.worker_threads + 2)

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        """Let every run end at its next safe point."""
        log.info("worker draining", worker=identity())
        # A signal has done so, unless it came before we followed them.
        if not shutdown.requested.is_set():
            shutdown.requested.set()


class Holding(Middleware):
    """Keeps this process's hold on its messages, and says of each when it starts.

    A start that never ends is a death that the message is made to answer for.  Runs are not
    counted here: their rows count their losses, and a dead letter would close such a row
    while its own count says that it may be tried again.
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

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        """Stop the heartbeat: nothing is in hand any more."""
        assert self._heartbeat is not None
        self._heartbeat.stop()

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Note the start; skip a message that was taken from us, or that a drain lets nobody start."""
        assert isinstance(broker, OurBroker)
        assert isinstance(message, Delivery)
        counted = "document" not in broker.get_actor(message.actor_name).options
        try:
            ours = not shutdown.requested.is_set() and broker.deliveries.start(
                message.queue_name, message.fetched.id, counted=counted
            )
        except Exception as error:  # noqa: BLE001, Dramatiq would swallow it, and go on without a word of ours
            # It is ours as far as anybody knows; not to work at all would be worse than not to count.
            log.warning("start not noted", message_id=message.message_id, error=describe(error))
            return
        if not ours:
            message.unstarted = True
            raise SkipMessage


class Connections(Middleware):
    """Gives each message a database connection, and takes it back clean."""

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Connect; raise `NotReady` when the database is away."""
        try:
            database.connect()
        except (pw.PeeweeException, MaxConnectionsExceeded) as error:
            raise NotReady(f"no connection to the database: {error}") from error

    def after_process_message(
        self,
        broker: Broker,
        message: MessageProxy,
        *,
        result: Any | None = None,
        exception: BaseException | None = None,
    ) -> None:
        """Give the connection back, whatever happened."""
        release()

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        """Give the connection back."""
        release()


class Runs(Middleware):
    """Starts and closes the run behind each message of a batch.

    The message's id is the id of the run's row, and the row decides: a message whose row
    cannot be started is a duplicate, and is acknowledged.
    """

    @property
    def actor_options(self) -> set[str]:
        """An actor declared with ``document=N`` is the parent of a batch."""
        return {"document"}

    def __init__(self) -> None:
        self._runner: Runner | None = None
        # By thread: a run that was taken from us may come back while its first attempt is still in its last chunk.
        self._attempts: dict[int, Attempt] = {}

    @needed
    def after_process_boot(self, broker: Broker) -> None:
        """Make this process able to run batches."""
        self._runner = Runner(load())

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Start the run; skip a message whose row cannot be started."""
        if "document" not in broker.get_actor(message.actor_name).options:
            return
        assert self._runner is not None, "messages are worked on in worker processes only"
        if not RUN_ID.fullmatch(message.message_id):
            raise NoRun(f"{message.message_id!r} is no run's number")
        assert isinstance(message, Delivery)
        try:
            attempt = self._runner.start(message.actor_name, int(message.message_id), token=_token(message))
        except pw.PeeweeException as error:
            raise NotReady(f"run {message.message_id} cannot be started: {error}") from error
        if attempt is None:
            raise SkipMessage
        message.begun = True
        self._attempts[get_ident()] = attempt

    def after_process_message(
        self,
        broker: Broker,
        message: MessageProxy,
        *,
        result: Any | None = None,
        exception: BaseException | None = None,
    ) -> None:
        """Close the run.  Only then is the message acknowledged; a run out of retries is a dead letter."""
        assert isinstance(message, Delivery)
        attempt = self._attempts.pop(get_ident(), None)
        if not message.begun:
            _never_begun(message, exception, child="child" in broker.get_actor(message.actor_name).options)
        if attempt is None:
            return
        assert self._runner is not None
        if self._runner.close(attempt, exception) == "failed":
            message.fail()


def _token(message: MessageProxy) -> UUID:
    """Return the token of the run that the message is for; one that nobody has where it says none."""
    try:
        return UUID(message.options.get(TOKEN))
    except (TypeError, ValueError, AttributeError):
        log.warning("message without its run's token", actor=message.actor_name, message_id=message.message_id)
        return UUID(int=0)


def _never_begun(message: Delivery, exception: BaseException | None, *, child: bool) -> None:
    """Say that a message ends without a run or a child; make it a dead letter, unless it comes again.

    A child that raised does: its retries are counted.  So does a run that only a server that was away kept from
    starting: its row waits, and a scheduler sends it again.
    """
    comes_again = exception is not None and (child or isinstance(exception, NotReady))
    if not comes_again:
        message.fail()
    log.error("message failed", actor=message.actor_name, message_id=message.message_id, exc_info=exception)


class Children(Middleware):
    """Works on the messages of a fan-out, and sends the successor of one that has more to do.

    A child declares itself with ``child=True``.  Its successor has the same message id, so
    it can only follow when this message has been acknowledged.
    """

    @property
    def actor_options(self) -> set[str]:
        """An actor declared with ``child=True`` is one of a fan-out."""
        return {"child"}

    def __init__(self) -> None:
        self._settings: Settings | None = None
        # By thread: after Redis was emptied the same message may come while we are at its first copy.
        self._working: dict[int, Child] = {}
        self._successors: set[str] = set()

    @needed
    def after_process_boot(self, broker: Broker) -> None:
        """Make this process able to work on children."""
        self._settings = load()

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Enter the child."""
        if "child" in broker.get_actor(message.actor_name).options:
            assert self._settings is not None
            child = Child(message.actor_name, message.message_id, self._settings, run=message.options.get(RUN))
            child.enter()
            assert isinstance(message, Delivery)
            message.begun = True
            self._working[get_ident()] = child

    def after_process_message(
        self,
        broker: Broker,
        message: MessageProxy,
        *,
        result: Any | None = None,
        exception: BaseException | None = None,
    ) -> None:
        """Leave the child, and remember whether it wants a successor."""
        child = self._working.pop(get_ident(), None)
        if child is not None:
            child.leave(exception)
            if child.more and exception is None and not shutdown.requested.is_set():
                self._successors.add(message.message_id)

    def after_ack(self, broker: Broker, message: MessageProxy) -> None:
        """Send the successor."""
        if message.message_id in self._successors:
            self._successors.discard(message.message_id)
            assert isinstance(broker, RedisBroker)
            actor = broker.get_actor(message.actor_name)
            origin = {name: value for name, value in message.options.items() if name in ORIGIN}
            successor = actor.message_with_options(args=message.args, **origin)
            enqueue_unique(broker, successor.copy(message_id=message.message_id))


class ChildRetries(Retries):
    """Retries children; the retry of a batch is its row's affair.

    The retry goes into the delayed queue with the acknowledgement, in one step that is tried
    until it works.
    """

    def after_process_message(
        self,
        broker: Broker,
        message: MessageProxy,
        *,
        result: Any | None = None,
        exception: BaseException | None = None,
    ) -> None:
        """Send a failed child again later, up to the documents' number of times; then it is a dead letter."""
        if "child" not in broker.get_actor(message.actor_name).options:
            return
        try:
            super().after_process_message(broker, message, result=result, exception=exception)  # type: ignore[no-untyped-call]
        except BaseException:
            # Dramatiq swallows what a hook raises and would acknowledge a message that nobody has retried.
            message.fail()
            raise


class Attendance(Middleware):
    """Says in the ledger's database that this process lives, which queues it has, and what its threads are at."""

    def __init__(self, at_work: AtWork) -> None:
        self._at_work = at_work
        self._presence: Presence | None = None

    @needed
    def after_worker_boot(self, broker: Broker, worker: Worker) -> None:
        """Begin to give signs of life."""

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
