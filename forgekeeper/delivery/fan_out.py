"""Fan-out: a message for each child, unless one is under way to it.

A child is known by its key.  The hash `forgekeeper:queued` has, for each key, Dramatiq's id of the message that was
sent last; it counts as long as Dramatiq keeps the body of that message, which is until the acknowledgement.  So a
message that vanished frees its key, nothing needs a time to live, and an emptied Redis forgets both.  The message and
its entry are written in one transaction.  Two that send at once may both send: a child works on what is due when it
runs, so twice is harmless.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import uuid4

import redis
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker

from forgekeeper.batches import ChildSpec
from forgekeeper.declaring.children import Enqueued, Keyed
from forgekeeper.delivery.queues import QUEUED, RUN, STARTED, bodies, ready
from forgekeeper.runs import quarantine


def send_children(
    broker: RedisBroker, run: int | None, child: ChildSpec, keyed_args: Sequence[Keyed], *, limit_depth: int | None
) -> Enqueued:
    """Send *child* a message of the *run* for each pair of key and arguments; one round trip for all of them.

    A key whose message is under way, or that waits in quarantine, gets none.  Nothing is sent once *limit_depth*
    messages wait in the queue.  Raises `redis.RedisError`, having sent nothing, or all of it where the reply was lost.
    """
    client, queue, wanted = broker.client, child.queue_name, dict(keyed_args)
    if limit_depth is not None and client.llen(ready(queue)) >= limit_depth:
        return Enqueued(queue_full=True)
    left_out = _under_way(client, queue, list(wanted)) | quarantine.waiting(child.batch.name, child.name, wanted)
    messages = [_message(child, key, args, run) for key, args in wanted.items() if key not in left_out]
    if messages:
        _enqueue(broker, queue, messages)
    return Enqueued(len(messages), len(keyed_args) - len(messages))


def ended(client: redis.Redis, key: str, *, starts: bool = True) -> None:
    """Forget the message that was sent to the key, and its *starts* where the child has ended."""
    with client.pipeline(transaction=False) as pipe:
        pipe.hdel(QUEUED, key)
        if starts:
            pipe.hdel(STARTED, key)
        pipe.execute()


def _under_way(client: redis.Redis, queue: str, keys: list[str]) -> set[str]:
    if not keys:
        return set()
    sent = [(key, one) for key, one in zip(keys, client.hmget(QUEUED, keys), strict=True) if one is not None]
    with client.pipeline(transaction=False) as pipe:
        for _, message in sent:
            pipe.hexists(bodies(queue), message)
        return {key for (key, _), kept in zip(sent, pipe.execute(), strict=True) if kept}


def _message(child: ChildSpec, key: str, args: tuple[object, ...], run: int | None) -> Message[None]:
    origin = {} if run is None else {RUN: run}
    options = {"redis_message_id": str(uuid4()), **origin}
    return child.message_with_options(args=args).copy(message_id=key, options=options)


def _enqueue(broker: RedisBroker, queue: str, messages: list[Message[None]]) -> None:
    """Write what Dramatiq's own `enqueue` writes for each message, and the entries of all, in one transaction."""
    for message in messages:
        broker.emit_before("enqueue", message, None)
    encoded = {message.options["redis_message_id"]: message.encode() for message in messages}
    with broker.client.pipeline(transaction=True) as pipe:
        pipe.hset(bodies(queue), mapping=encoded)
        pipe.rpush(ready(queue), *encoded)
        pipe.hset(QUEUED, mapping={one.message_id: one.options["redis_message_id"] for one in messages})
        pipe.execute()
    for message in messages:
        broker.emit_after("enqueue", message, None)
