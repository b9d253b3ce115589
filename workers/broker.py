"""The broker.

This is the one module that does something when imported: it builds the broker, because
Dramatiq registers actors where they are declared.  Nothing connects before
`workers.clients.connect`.
"""

from __future__ import annotations

from typing import Any

import dramatiq
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import current_millis, dq_name
from dramatiq.middleware import TimeLimit

from models.job_run import MAX_RETRIES
from workers.clients import client
from workers.middleware import Children, ChildRetries, Clients, Connections, Runs

NAMESPACE = "forgekeeper"
QUEUES = ("cron", "git", "artifacts", "objects")


class Broker(RedisBroker):
    """A broker in which a message is known in Redis by its own id, through all its retries.

    That id is what makes it one of a kind: while it waits, is queued or is worked on, the
    same cannot be put in again.
    """

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        """Put *message* into its queue, or let it wait *delay* milliseconds first."""
        message = message.copy(options={"redis_message_id": message.message_id})
        if delay is not None:
            waiting_line, eta = dq_name(message.queue_name), current_millis() + delay
            message = message.copy(queue_name=waiting_line, options={"eta": eta})
        self.emit_before("enqueue", message, delay)
        self.do_enqueue(message.queue_name, message.message_id, message.encode())
        self.emit_after("enqueue", message, delay)
        return message


broker = Broker(  # type: ignore[no-untyped-call]
    client=client,
    namespace=NAMESPACE,
    # Outermost first.  The time limit comes last, so that it is disarmed first: raised
    # while a run is being closed it would end the thread and lose the message.
    middleware=[
        ChildRetries(max_retries=MAX_RETRIES, min_backoff=15_000, max_backoff=600_000),
        Clients(),
        Connections(),
        Runs(),
        Children(),
        TimeLimit(),
    ],
    # Dead workers' messages return when somebody looks for them.  By default that is one
    # command in a thousand, ten minutes on an idle system; here it is every command.
    maintenance_chance=1_000_000,
)
dramatiq.set_broker(broker)
