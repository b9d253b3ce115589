"""What every message passes through: a connection, the attempt that it is for, and its retries."""

from __future__ import annotations

from functools import partial
from threading import get_ident
from typing import Any
from uuid import UUID

import peewee as pw
import structlog
from dramatiq import Broker, MessageProxy
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Middleware, MiddlewareError, Retries, SkipMessage
from playhouse.pool import MaxConnectionsExceeded

from forgekeeper import shutdown
from forgekeeper.batches import BatchSpec, ChildSpec, Declared, spec
from forgekeeper.boot import load
from forgekeeper.database import database, release
from forgekeeper.delivery.enqueue_unique import TOKEN, enqueue_unique
from forgekeeper.delivery.hands import Delivery
from forgekeeper.delivery.queues import RUN
from forgekeeper.identity import identity
from forgekeeper.process.actors import RUN_ID, send_children
from forgekeeper.process.middleware import needed
from forgekeeper.process.tracing import HEADER
from forgekeeper.runs import counting
from forgekeeper.runs.attempt import Attempt
from forgekeeper.runs.holds import Hold
from forgekeeper.runs.ledger import JobRun, Started
from forgekeeper.runs.runner import Runner

ORIGIN = {RUN, HEADER}
"""What a message's options say of where it comes from."""

log = structlog.get_logger(__name__)


class NotReady(MiddlewareError):
    """The message cannot be worked on now; Dramatiq swallows other errors of a hook and goes on."""


class NoRun(MiddlewareError):
    """The message is of a batch and names no run; nothing will ever change that."""


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


class Attempts(Middleware):
    """Begins the attempt that a message is for, hands it to the actor, and closes it before the acknowledgement.

    A batch's message has the number of its run's row, and the row decides: a message whose row cannot be started is a
    duplicate, and is acknowledged.  The successor of a child that has left something has the same message id, so it is
    sent after the acknowledgement.  A child that nobody has declared is only called.
    """

    @property
    def actor_options(self) -> set[str]:
        """An actor declared with ``document=N`` is a batch's, one with ``child=True`` a child's."""
        return {"document", "child"}

    def __init__(self) -> None:
        self._runner: Runner | None = None
        # By thread: the same message may come again while its first copy is still in hand.
        self._attempts: dict[int, Attempt] = {}
        self._successors: set[str] = set()

    @needed
    def after_process_boot(self, broker: Broker) -> None:
        """Make this process able to begin attempts."""
        assert isinstance(broker, RedisBroker)
        settings = load()
        self._runner = Runner(settings, partial(send_children, broker, limit_depth=settings.queue_limit))

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Begin the attempt; skip a message whose row cannot be started."""
        assert isinstance(message, Delivery)
        declared = spec(message.actor_name)
        if declared is not None:
            attempt = self._attempt(declared, message)
            self._attempts[get_ident()] = attempt.__enter__()
            # Dramatiq calls the actor with these; the message itself, of which others make copies, keeps its own.
            message.args = (attempt, *message.args)
        elif "document" in broker.get_actor(message.actor_name).options:
            raise NoRun(f"{message.actor_name} is no declared batch")
        message.begun = True

    def _attempt(self, declared: Declared, message: MessageProxy) -> Attempt:
        assert self._runner is not None, "messages are worked on in worker processes only"
        if isinstance(declared, BatchSpec):
            return self._started(self._runner, declared, message)
        assert isinstance(declared, ChildSpec)
        return self._runner.child(declared, message.message_id, run=message.options.get(RUN))

    def _started(self, runner: Runner, batch: BatchSpec, message: MessageProxy) -> Attempt:
        if not RUN_ID.fullmatch(message.message_id):
            raise NoRun(f"{message.message_id!r} is no run's number")
        try:
            started = _start(batch, int(message.message_id), token=_token(message))
        except pw.PeeweeException as error:
            raise NotReady(f"run {message.message_id} cannot be started: {error}") from error
        if started is None:
            raise SkipMessage
        return runner.attempt(batch, started)

    def after_process_message(
        self,
        broker: Broker,
        message: MessageProxy,
        *,
        result: Any | None = None,
        exception: BaseException | None = None,
    ) -> None:
        """Close the attempt.  Only then is the message acknowledged; a run out of retries is a dead letter."""
        assert isinstance(message, Delivery)
        attempt = self._attempts.pop(get_ident(), None)
        if not message.begun:
            _never_begun(message, exception, child="child" in broker.get_actor(message.actor_name).options)
        if attempt is None:
            return
        del message.args
        attempt.close(exception)
        if attempt.state == "failed":
            message.fail()
        if attempt.wants_successor and attempt.row is None and not shutdown.requested.is_set():
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


def _start(batch: BatchSpec, number: int, *, token: UUID) -> Started | None:
    """Start the run of that number and token; None when there is none to start, or the batch is held back."""
    started = JobRun.start(batch.name, number, token=token, by=identity())
    if started is None:
        # The row of a batch that is held back stays open; its message is sent again afterwards.
        reason = Hold.why(batch.name) or "duplicate"
        counting.run_skipped(batch.name, reason)
        log.info("run skipped", batch=batch.name, run=number, reason=reason)
    else:
        counting.run_started(batch.name, started)
    return started


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
