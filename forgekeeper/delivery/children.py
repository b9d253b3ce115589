"""Children middleware: what Dramatiq does not know of a message that works on a share of what is due.

* A child is sent once until it has ended (`fan_out`); its end removes the entry, and sends a successor where it has
  left something.
* Dramatiq gives the message of a dead process to another one, however often (its issue 213).  Here each start is
  counted until it ends; a child that has taken three processes down with it goes into quarantine.
* A message that Dramatiq rejects, since its actor is unknown or its body cannot be read, goes into quarantine with
  what is known of it.

Nothing is retried inside Redis: a child that failed is in quarantine until its time has come, and the next run sends
it again (`forgekeeper.runs.attempt`).
"""

from __future__ import annotations

from typing import Any

import peewee as pw
import redis
import structlog
from dramatiq import Broker, MessageProxy
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Middleware, SkipMessage

from forgekeeper import shutdown
from forgekeeper.batches import CHILDREN, ChildSpec
from forgekeeper.connections import client
from forgekeeper.database import database
from forgekeeper.delivery.encoder import UNREADABLE
from forgekeeper.delivery.fan_out import ended
from forgekeeper.delivery.process import NotReady, Process
from forgekeeper.delivery.queues import RUN, STARTED, bodies, fetched
from forgekeeper.runs import quarantine
from forgekeeper.runs.counting import harmless
from forgekeeper.runs.retry import MAX_LOSSES
from metrics.counting import dead_lettered
from metrics.redaction import clean, describe

log = structlog.get_logger(__name__)


class ChildMessages(Middleware):
    """Begins the attempt of a child, hands it to the actor, and closes it before the acknowledgement."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Begin the attempt; skip a child that has taken too many processes down with it."""
        child = CHILDREN.get(message.actor_name)
        if child is None:
            return
        if _starts(message.message_id) > MAX_LOSSES:
            try:
                self._quarantine(child, message)
            except pw.PeeweeException as error:
                raise NotReady(f"{message.message_id} cannot be quarantined: {error}") from error
            raise SkipMessage
        attempt = self._process.runner.child(child, message.message_id, run=message.options.get(RUN)).__enter__()
        self._process.in_flight.attempt(attempt)
        message.args = (attempt, *message.args)

    def after_process_message(
        self,
        broker: Broker,
        message: MessageProxy,
        *,
        result: Any | None = None,
        exception: BaseException | None = None,
    ) -> None:
        """Close the attempt, forget the message, and send a successor where something is left."""
        child = CHILDREN.get(message.actor_name)
        if child is None:
            return
        attempt = self._process.in_flight.begun()
        if attempt is not None:
            attempt.close(exception)
        elif exception is not None:
            log.error("child not started", child=child.name, message_id=message.message_id, exc_info=exception)
        # Where it was not begun, its earlier starts still count.
        _forget(message, starts=attempt is not None)
        if attempt is not None and attempt.wants_successor and not shutdown.requested.is_set():
            self._process.fan_out(message.options.get(RUN), child, [(message.message_id, message.args[1:])])

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        """Forget the message."""
        if message.actor_name in CHILDREN:
            _forget(message)

    def before_nack(self, broker: Broker, message: MessageProxy) -> None:
        """Put a message that nothing can read into quarantine; Dramatiq keeps it for some days, for eyes alone."""
        assert isinstance(broker, RedisBroker)
        body = message.options.get(UNREADABLE)
        queue, number = _whereabouts(broker, body) if body is not None else (message.queue_name, message.message_id)
        if body is not None:
            message.options["redis_message_id"] = number
        error = "its body is no message" if body is not None else f"there is no actor {clean(message.actor_name)}"
        log.error("message rejected", queue=queue, message_id=clean(number), reason=error)
        with database.connection_context():
            quarantine.fail("unknown", queue, number, error, reason="unreadable")

    def _quarantine(self, child: ChildSpec, message: MessageProxy) -> None:
        error = f"{MAX_LOSSES} processes died while they worked on it"
        log.error("child quarantined", child=child.name, message_id=message.message_id, reason="worker_lost")
        run = message.options.get(RUN)
        quarantine.fail(child.batch.name, child.name, message.message_id, error, reason="worker_lost", run=run)
        with harmless():
            dead_lettered(child.name)


def _starts(key: str) -> int:
    """Count a start of the child; return how many have not ended.  Where Redis is away, it is the first."""
    try:
        return int(client.hincrby(STARTED, key, 1))
    except redis.RedisError as error:
        log.warning("start not counted", message_id=key, error=describe(error))
        return 1


def _forget(message: MessageProxy, *, starts: bool = True) -> None:
    try:
        ended(client, message.message_id, starts=starts)
    except redis.RedisError as error:
        # The acknowledgement waits for Redis, and then the entry does not count any more.
        log.warning("child not forgotten", message_id=message.message_id, error=describe(error))


def _whereabouts(broker: RedisBroker, body: bytes) -> tuple[str, str]:
    """Find the queue and Dramatiq's id of a body that this process has fetched: it does not say them itself."""
    for queue in broker.get_declared_queues():
        for number in fetched(client, broker.broker_id, queue):
            if client.hget(bodies(queue), number) == body:
                return queue, number
    return "", ""
