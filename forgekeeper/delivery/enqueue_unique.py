"""Messages: put in once, found among the dead, forgotten in the end.

The keys are Dramatiq's own: a message that is put in here is fetched by any Dramatiq
worker, and everything that reads Dramatiq's queues reads ours.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, NamedTuple

from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker
from dramatiq.errors import DecodeError

from forgekeeper.delivery.keys import QueueKeys
from forgekeeper.delivery.sizes import fitting
from forgekeeper.redis_values import moment, text
from forgekeeper.scripts import call

DEAD_MESSAGE_TTL = timedelta(days=7)
"""How long dead letters are kept: Dramatiq's number, long enough for a holiday."""
TOKEN = "forgekeeper_token"  # noqa: S105, it is no secret
"""The option in which a run's message says which run of its number it is for."""


def enqueue_unique(broker: RedisBroker, message: Message[Any]) -> bool:
    """Put *message* into its queue; return False when its id is on its way already.

    The id is the message's own: it counts as on its way from here until a worker has
    acknowledged it, however often its worker dies, and not a moment longer.  Raises
    `MessageTooLarge`, having put nothing in.
    """
    message = message.copy(options={"redis_message_id": message.message_id})
    broker.emit_before("enqueue", message, None)
    pushed = call(
        broker.client,
        "enqueue_unique",
        keys=QueueKeys(broker.namespace, message.queue_name).for_enqueue,
        args=[
            message.message_id,
            fitting(message.encode(), actor=message.actor_name, message_id=message.message_id),
        ],
    )
    if pushed:
        broker.emit_after("enqueue", message, None)
    return bool(pushed)


def is_dead(broker: RedisBroker, message: Message[Any]) -> bool:
    """Say whether the message lies in its queue's dead letters; one of its id with another token does not count."""
    keys = QueueKeys(broker.namespace, message.queue_name)
    body: Any = broker.client.hget(keys.dead_bodies, message.message_id)
    try:
        return body is not None and Message.decode(body).options.get(TOKEN) == message.options.get(TOKEN)
    except (DecodeError, AttributeError):
        return False  # it may be anything


def forget_dead(broker: RedisBroker, queue: str, *, ttl: timedelta = DEAD_MESSAGE_TTL, limit: int) -> int:
    """Forget up to *limit* dead letters of the queue older than *ttl*; return how many."""
    milliseconds = round(ttl.total_seconds() * 1000)
    keys = QueueKeys(broker.namespace, queue).for_dead_letters
    forgotten: int = call(broker.client, "forget_dead", keys=keys, args=[milliseconds, limit])
    return forgotten


def old_dead(broker: RedisBroker, queue: str, *, ttl: timedelta = DEAD_MESSAGE_TTL, limit: int) -> OldDead:
    """Return what `forget_dead` would forget; name up to *limit*.  Nothing is changed."""
    seconds, microseconds = broker.client.time()
    horizon = seconds * 1_000 + microseconds // 1_000 - round(ttl.total_seconds() * 1_000)
    dead, old = QueueKeys(broker.namespace, queue).dead, f"({horizon}"
    with broker.client.pipeline(transaction=True) as pipe:
        pipe.zcount(dead, "-inf", old)
        pipe.zrangebyscore(dead, "-inf", old, 0, max(1, limit), withscores=True)
        letters, ages = pipe.execute()
    found = [(text(member), moment((score + ttl.total_seconds() * 1_000) / 1_000)) for member, score in ages]
    return OldDead(int(letters), found)


class OldDead(NamedTuple):
    """Dead letters whose time is up: how many, and the ids of the oldest with the instant at which it was."""

    letters: int
    oldest: list[tuple[str, datetime]]
