"""Fan-out: many messages for one actor, each put in once.

What `enqueue_unique` promises of one message holds of each of these; a chunk of them goes to
Redis in one script.  A crash between two chunks leaves the first one in and nothing of
the second: calling again with the same ids completes the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any

from dramatiq import Actor, Message, get_encoder
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import SkipMessage

from forgekeeper.delivery.keys import QueueKeys
from forgekeeper.delivery.sizes import fitting
from forgekeeper.fan_out import Enqueued, Keyed
from forgekeeper.scripts import call

CHUNK = 1000
"""Messages in one script: 1,000 occupy Redis for a few milliseconds, and larger chunks are no faster."""

NONE: Mapping[str, Any] = MappingProxyType({})


def enqueue_many(
    broker: RedisBroker,
    actor: Actor[..., Any],
    keyed_args: Iterable[Keyed],
    *,
    limit_depth: int | None = None,
    options: Mapping[str, Any] = NONE,
) -> Enqueued:
    """Send *actor* a message with *options* for each pair of message id and arguments, unless that id is on its way.

    Nothing more is sent once *limit_depth* messages are ready in the queue.  That is asked
    before each chunk, so the queue may grow a chunk beyond it.  Raises `MessageTooLarge`, and puts
    nothing in of the chunk that has such a message.
    """
    keys = QueueKeys(broker.namespace, actor.queue_name)
    remaining = iter(keyed_args)
    enqueued = seen = 0
    while chunk := list(islice(remaining, CHUNK)):
        if limit_depth is not None and broker.client.llen(keys.ready) >= limit_depth:
            return Enqueued(enqueued, seen - enqueued, queue_full=True)
        seen += len(chunk)
        enqueued += _enqueue(broker, keys, _messages(broker, actor, chunk, options))
    return Enqueued(enqueued, seen - enqueued)


def _messages(
    broker: RedisBroker, actor: Actor[..., Any], chunk: list[Keyed], options: Mapping[str, Any]
) -> list[Message[Any]]:
    template = actor.message_with_options()
    messages = []
    for message_id, args in chunk:
        message: Message[Any] = Message(
            template.queue_name,
            template.actor_name,
            args,
            {},
            {**options, "redis_message_id": message_id},
            message_id,
            template.message_timestamp,
        )
        try:
            broker.emit_before("enqueue", message, None)
        except SkipMessage:
            continue
        messages.append(message)
    return messages


def _enqueue(broker: RedisBroker, keys: QueueKeys, messages: list[Message[Any]]) -> int:
    encode = get_encoder().encode
    accepted: bytes = call(
        broker.client,
        "enqueue_many",
        keys=keys.for_enqueue,
        # What Message.encode() gives, without its look at the class's fields for every message.
        args=[
            part
            for message in messages
            for part in (
                message.message_id,
                fitting(encode(vars(message)), actor=message.actor_name, message_id=message.message_id),
            )
        ],
    )
    for message, digit in zip(messages, accepted, strict=True):
        if digit == ord("1"):
            broker.emit_after("enqueue", message, None)
    return accepted.count(b"1")
