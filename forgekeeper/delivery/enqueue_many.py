"""Fan-out: many messages for one actor, each put in once.

What `enqueue_unique` promises of one message holds of each of these; a chunk of them goes to
Redis in one script.  A crash between two chunks leaves the first one in and nothing of
the second: calling again with the same ids completes the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from os import urandom
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson
from dramatiq import Actor, Message, get_encoder
from dramatiq.brokers.redis import RedisBroker
from dramatiq.encoder import JSONEncoder
from dramatiq.middleware import SkipMessage

from forgekeeper.delivery.keys import QueueKeys
from forgekeeper.delivery.sizes import fitting
from forgekeeper.fan_out import Enqueued, Keyed
from forgekeeper.scripts import call

CHUNK = 1000
"""Messages in one script: 1,000 occupy Redis for a few milliseconds, and larger chunks are no faster."""

AS_JSON = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS
"""What is no JSON is left to Dramatiq's encoder."""
GRAIN = 16
"""Bytes of a message's salt."""
NONE: Mapping[str, Any] = MappingProxyType({})


class Chunk(NamedTuple):
    """Messages of *size* pairs, and what the script is given for them."""

    size: int
    messages: list[Message[Any]]
    packed: bytes


def enqueue_many(
    broker: RedisBroker,
    actor: Actor[..., Any],
    keyed_args: Iterable[Keyed],
    *,
    limit_depth: int | None = None,
    options: Mapping[str, Any] = NONE,
    salt: str | None = None,
) -> Enqueued:
    """Send *actor* a message with *options* for each pair of message id and arguments, unless that id is on its way.

    Nothing more is sent once *limit_depth* messages are ready in the queue.  That is asked
    before each chunk, so the queue may grow a chunk beyond it; of *keyed_args* a chunk more is read.
    Raises `MessageTooLarge`, and puts nothing in of the chunk that has such a message.

    *salt* names an option that makes each body differ from all others in many places.  Redis's Lua looks at every
    seventh byte of such a string only, and bodies that differ in a number are alike to it: of a thousand of them the
    script takes 13 microseconds each, with salt 2 (`python -m benchmarks fan_out`).
    """
    keys = QueueKeys(broker.namespace, actor.queue_name)
    remaining = iter(keyed_args)

    def prepared() -> Chunk:
        chunk = list(islice(remaining, CHUNK))
        messages = _messages(broker, actor, chunk, options, salt)
        return Chunk(len(chunk), messages, _packed(messages))

    enqueued = seen = 0
    chunk = prepared()
    while chunk.size:
        if limit_depth is not None and broker.client.llen(keys.ready) >= limit_depth:
            return Enqueued(enqueued, seen - enqueued, queue_full=True)
        accepted = call(broker.client, "enqueue_many", keys=keys.for_enqueue, args=[chunk.packed])
        seen += chunk.size
        enqueued += _told(broker, chunk.messages, accepted)
        chunk = prepared()
    return Enqueued(enqueued, seen - enqueued)


def _messages(
    broker: RedisBroker, actor: Actor[..., Any], chunk: list[Keyed], options: Mapping[str, Any], salt: str | None
) -> list[Message[Any]]:
    template = actor.message_with_options()
    salts = [{}] * len(chunk) if salt is None else [{salt: grain} for grain in _grains(len(chunk))]
    messages = []
    for (message_id, args), salted in zip(chunk, salts, strict=True):
        message: Message[Any] = Message(
            template.queue_name,
            template.actor_name,
            args,
            {},
            {**options, **salted, "redis_message_id": message_id},
            message_id,
            template.message_timestamp,
        )
        try:
            broker.emit_before("enqueue", message, None)
        except SkipMessage:
            continue
        messages.append(message)
    return messages


def _grains(count: int) -> list[str]:
    size = 2 * GRAIN
    grains = urandom(GRAIN * count).hex()
    return [grains[at : at + size] for at in range(0, len(grains), size)]


def _told(broker: RedisBroker, messages: list[Message[Any]], accepted: bytes) -> int:
    """Tell of the messages that were put in; return how many."""
    for message, digit in zip(messages, accepted, strict=True):
        if digit == ord("1"):
            broker.emit_after("enqueue", message, None)
    return accepted.count(b"1")


def _packed(messages: list[Message[Any]]) -> bytes:
    encode, packed = _encoder(), bytearray()
    for message in messages:
        message_id = message.message_id
        # What Message.encode() gives, without its look at the class's fields for every message.
        body = fitting(encode(vars(message)), actor=message.actor_name, message_id=message_id)
        raw_id = message_id.encode()
        packed += len(raw_id).to_bytes(4) + raw_id + len(body).to_bytes(4) + body
    return bytes(packed)


def _encoder() -> Callable[[dict[str, Any]], bytes]:
    """Return what encodes as Dramatiq does; its own JSON takes 4 microseconds for a message, orjson a half."""
    encoder = get_encoder()
    if type(encoder) is not JSONEncoder:
        return encoder.encode

    def encode(message: dict[str, Any]) -> bytes:
        try:
            return orjson.dumps(message, option=AS_JSON)
        except orjson.JSONEncodeError:
            # An integer of more than 64 bits, half a character, or what Dramatiq refuses, too.
            return encoder.encode(message)

    return encode
