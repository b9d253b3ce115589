"""Dramatiq's broker, with our delivery below it: one message of an id at a time, through all its retries."""

from __future__ import annotations

from collections import defaultdict
from typing import Any
from uuid import uuid4

import dramatiq
import redis
from dramatiq import Actor, Message
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import current_millis, dq_name

from forgekeeper.delivery.consumer import Consumer
from forgekeeper.delivery.deliveries import Deliveries, Fetched
from forgekeeper.delivery.doorbell import Doorbell
from forgekeeper.delivery.hands import Delivery, Due, Hands
from forgekeeper.delivery.queues import depth
from forgekeeper.delivery.sizes import fitting
from forgekeeper.delivery.work_queue import WorkQueue
from forgekeeper.identity import identity
from metrics.redaction import clean


class Broker(RedisBroker):
    """A broker in which a message is known in Redis by its own id, through all its retries.

    That id is what makes it one of a kind: while it waits, is queued or is worked on, the
    same cannot be put in again.
    """

    def __init__(self, *, client: redis.Redis, namespace: str, middleware: list[dramatiq.Middleware]) -> None:
        super().__init__(client=client, namespace=namespace, middleware=middleware)  # type: ignore[no-untyped-call]
        self._hands: dict[str, Hands] = defaultdict(Hands)
        self.enrol()

    def declare_actor(self, actor: Actor[..., Any]) -> None:
        """Declare a batch (``document=``) or a child (``child=True``); raise `TypeError` for any other actor.

        Whatever else it raised, nobody would hear of it: only a run has a row, and only a child is sent again.
        """
        if (actor.options.get("child") is True) == ("document" in actor.options):
            raise TypeError(
                f"actor {actor.actor_name} is neither a batch nor a child, or both: declare it by"
                " `@batch` or `@child`, or with one of the options document=NUMBER and child=True"
            )
        super().declare_actor(actor)

    def enrol(self) -> None:
        """Make this process a worker of its own; Dramatiq would share one name among all forks of a master."""
        self.broker_id = f"{identity()}:{uuid4().hex[:12]}"
        self.deliveries = Deliveries(self.client, self.namespace, self.broker_id)
        self.doorbell = Doorbell(self.client, self.namespace)
        self.work_queue = WorkQueue()

    def in_hand(self) -> dict[str, list[bytes]]:
        """Return the ids of all messages that this process has fetched and not ended, by queue."""
        found = {queue: [fetched.id for fetched in hands.all()] for queue, hands in list(self._hands.items())}
        return {queue: ids for queue, ids in found.items() if ids}

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 5000) -> Consumer:
        """Return a consumer of the queue; it idles for *timeout* milliseconds at a time, or for longer."""
        hands, bell = self._hands[queue_name], self.doorbell.bell(queue_name)
        options = {"prefetch": prefetch, "timeout": timeout}
        return Consumer(self, self.deliveries, queue_name, hands, bell, work_queue=self.work_queue, **options)

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        """Put *message* into its queue, or let it wait *delay* milliseconds first.

        One whose id is on its way already is not put in.  One that a worker has in hand
        waits from its acknowledgement on.  Raises `MessageTooLarge`, having put nothing in.
        """
        if isinstance(message, Due):
            return message
        delivery = message if isinstance(message, Delivery) else None
        message = message.copy(options={"redis_message_id": message.message_id})
        if delay is not None:
            waiting_line, eta = dq_name(message.queue_name), current_millis() + delay
            message = message.copy(queue_name=waiting_line, options={"eta": eta})
        self.emit_before("enqueue", message, delay)
        if delivery is not None:
            # Here it is heard of if that cannot be written; where the message is ended it would be in the way for ever.
            delivery.later = _with_short_trace(message).encode()
        elif not self.do_enqueue(message.queue_name, message.message_id, _body(message)):
            return message
        self.emit_after("enqueue", message, delay)
        return message

    # What Dramatiq itself calls its commands

    def do_enqueue(self, queue: str, message_id: str, body: bytes) -> bool:
        """Enqueue a message, unless its id is on its way already."""
        return self.deliveries.enqueue(queue, message_id, body)

    def do_fetch(self, queue: str, limit: int) -> list[bytes]:
        """Take messages; return their bodies."""
        return [fetched.body for fetched in self.deliveries.fetch(queue, limit=limit) if isinstance(fetched, Fetched)]

    def do_ack(self, queue: str, message_id: str) -> bool:
        """End a message that is done."""
        return self.deliveries.ack(queue, message_id)

    def do_nack(self, queue: str, message_id: str) -> bool:
        """Make a message a dead letter."""
        return self.deliveries.nack(queue, message_id, reason="failed")

    def do_requeue(self, queue: str, *message_ids: str) -> int:
        """Requeue messages."""
        return self.deliveries.requeue(queue, message_ids)

    def do_qsize(self, queue: str) -> int:
        """Count the messages that are not done."""
        counts = depth(self.client, self.namespace, queue)
        return counts["ready"] + counts["in_flight"] + counts["delayed"]


def _body(message: Message[Any]) -> bytes:
    return fitting(message.encode(), actor=message.actor_name, message_id=message.message_id)


def _with_short_trace(message: Message[Any]) -> Message[Any]:
    """Return the message with the trace of its last error as a line has it, however much the error had to say."""
    trace = message.options.get("traceback")
    return message.copy(options={"traceback": clean(trace)}) if isinstance(trace, str) else message
