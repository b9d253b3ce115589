"""Ledger middleware: a message of a batch starts the run that its row describes, and closes it.

Dramatiq knows messages, and loses them: a message that fails while Redis is away is acknowledged, and one whose worker
dies comes back by chance.  Here the row of `job_runs` is the truth.  The message has the row's number and token; a
message whose row cannot be started is a duplicate, and is acknowledged.  A run that was sent and has not started is
sent again by the schedulers (`forgekeeper.runs.reconcile`), and so is one that waits for its retry.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

import peewee as pw
import structlog
from dramatiq import Broker, MessageProxy
from dramatiq.middleware import Middleware, MiddlewareError, SkipMessage

from forgekeeper.batches import BATCHES, BatchSpec
from forgekeeper.delivery.process import RUN_ID, NotReady, Process
from forgekeeper.delivery.sending import TOKEN
from forgekeeper.runs import counting
from forgekeeper.runs.holds import Hold
from forgekeeper.runs.identity import identity
from forgekeeper.runs.ledger import JobRun, Started

log = structlog.get_logger(__name__)


class NoRun(MiddlewareError):
    """The message is of a batch and names no run."""


class RunMessages(Middleware):
    """Starts the run of a message, hands the attempt to the actor, and closes it before the acknowledgement."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Begin the attempt; skip a message whose row cannot be started."""
        batch = BATCHES.get(message.actor_name)
        if batch is None:
            return
        started = _started(batch, message)
        if started is None:
            raise SkipMessage
        attempt = self._process.runner.attempt(batch, started).__enter__()
        self._process.in_flight.attempt(attempt)
        message.args = (attempt,)

    def after_process_message(
        self,
        broker: Broker,
        message: MessageProxy,
        *,
        result: Any | None = None,
        exception: BaseException | None = None,
    ) -> None:
        """Close the attempt; one that could not begin is said, and its row is sent again."""
        if message.actor_name not in BATCHES:
            return
        attempt = self._process.in_flight.begun()
        if attempt is not None:
            attempt.close(exception)
        elif exception is not None:
            log.error("run not started", batch=message.actor_name, message_id=message.message_id, exc_info=exception)


def _started(batch: BatchSpec, message: MessageProxy) -> Started | None:
    """Start the run of the message; None when there is none to start, or the batch is held back."""
    if not RUN_ID.fullmatch(message.message_id):
        raise NoRun(f"{message.message_id!r} is no run's number")
    number = int(message.message_id)
    try:
        started = JobRun.start(batch.name, number, token=_token(message), by=identity())
        reason = None if started else Hold.why(batch.name) or "duplicate"
    except pw.PeeweeException as error:
        raise NotReady(f"run {number} cannot be started: {error}") from error
    if started is None:
        # The row of a batch that is held back stays open; its message is sent again afterwards.
        counting.run_skipped(batch.name, reason or "duplicate")
        log.info("run skipped", batch=batch.name, run=number, reason=reason)
    else:
        counting.run_started(batch.name, started)
    return started


def _token(message: MessageProxy) -> UUID:
    """Return the token of the run that the message is for; one that no run has where the message names none."""
    try:
        return UUID(message.options.get(TOKEN))
    except (TypeError, ValueError, AttributeError):
        log.warning("message without its run's token", actor=message.actor_name, message_id=message.message_id)
        return UUID(int=0)
