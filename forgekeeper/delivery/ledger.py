"""Ledger: the message of a run, which only says that there is something to start; the run's row decides.

Dramatiq loses messages: one that fails while Redis is away is acknowledged, one whose worker dies comes back by chance.
So a message has the number and token of a row of `job_runs`; when that cannot be started it is a duplicate, and is
acknowledged.  A run that was sent and has not started is sent again by the schedulers (`forgekeeper.runs.reconcile`).
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

import peewee as pw
import structlog
from dramatiq import Broker, Message, MessageProxy
from dramatiq.middleware import Middleware, SkipMessage

from forgekeeper.batches import BATCHES, BatchSpec
from forgekeeper.delivery.process import NotReady, Process
from forgekeeper.runs import by_hand, counting
from forgekeeper.runs.holds import Hold
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.processes import identity

TOKEN = "forgekeeper_token"  # noqa: S105, it is no secret
"""The option in which a run's message says which run of its number it is for."""

log = structlog.get_logger(__name__)


class RunMessages(Middleware):
    """Starts the run of a message, hands the attempt to the actor, and closes it before the acknowledgement."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Begin the attempt; skip a message whose row cannot be started."""
        batch = BATCHES.get(message.actor_name)
        if batch is None:
            return
        number, token = message.message_id, message.options.get(TOKEN)
        try:
            started = JobRun.start(batch.name, int(number), token=UUID(token), by=identity())
            reason = Hold.why(batch.name) if started is None else None
        except (pw.PeeweeException, AttributeError, TypeError, ValueError) as error:
            raise NotReady(f"run {number} cannot be started: {error}") from error
        if started is None:
            # The row of a batch that is held back stays open; its message is sent again afterwards.
            counting.run_skipped(batch.name, reason or "duplicate")
            log.info("run skipped", batch=batch.name, run=int(number), reason=reason or "duplicate")
            raise SkipMessage
        counting.run_started(batch.name, started)
        message.args = (self._process.begin(self._process.runner.attempt(batch, started)),)

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        """Close the attempt; the row of one that could not begin is sent again."""
        if message.actor_name in BATCHES:
            self._process.close(message, exception)


def message_of(batch: BatchSpec, run: JobRun) -> Message[Any]:
    """Return the message by which a worker starts *run*, and no other run that had its number before a restore."""
    return Message(batch.queue, batch.name, (), {}, {TOKEN: str(run.token)}, str(run.id))


def deliver(run: JobRun) -> None:
    """Send the run's message; raise `redis.RedisError`."""
    batch = BATCHES[run.batch]
    batch.broker.enqueue(message_of(batch, run))


def send(batch: BatchSpec) -> Message[Any]:
    """Send a run of the batch, or again the one that is open; return its message, or raise `NotSent`."""
    return message_of(batch, by_hand.send(batch, deliver))
