"""The messages of children: one child in a message's arguments, or several in an option.

`forgekeeper:queued` maps a child's key to Dramatiq's id of its last message, `forgekeeper:started` maps it to its
starts without an end.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any
from uuid import uuid4

from dramatiq import Message, MessageProxy
from dramatiq.brokers.redis import RedisBroker

from forgekeeper.api.answers import EnqueueCounts, KeyedArguments
from forgekeeper.api.batches import ChildSpec
from forgekeeper.delivery.queues import QUEUED_CHILDREN_KEY, STARTED_CHILDREN_KEY, bodies_key, ready_key
from forgekeeper.ledger import quarantine
from forgekeeper.platform.connections import client

RUN_OPTION = "forgekeeper_run"
"""The option with the number of the run that sent the child's message."""
FAILED_OPTION = "forgekeeper_failed"
"""The option that says whether a child of the message had failed when the message was sent."""
CALLS_OPTION = "forgekeeper_children"
"""The option with the key and the arguments of each child of a message with several children."""


def build_child_message(
    child: ChildSpec, calls: Sequence[KeyedArguments], run: int | None, *, has_failed: bool
) -> Message[None]:
    """Return a message with the children *calls*, named by its first child; it says whether one *has_failed* before.

    An older worker executes the first child, and the next run sends the others again.
    """
    (key, arguments), *others = calls
    options: dict[str, Any] = {"redis_message_id": str(uuid4()), RUN_OPTION: run, FAILED_OPTION: has_failed}
    options |= {CALLS_OPTION: list(calls)} if others else {}
    return Message(child.queue, child.name, arguments, {}, options, key)


def list_calls(message: Message[Any] | MessageProxy) -> list[KeyedArguments]:
    """Return the key and the arguments of each child; the message's own without the option, or with a malformed one."""
    match message.options.get(CALLS_OPTION):
        case [_, *_] as calls if all(_is_call(one) for one in calls):
            return [(key, tuple(arguments)) for key, arguments in calls]
    return [(message.message_id, tuple(message.args))]


def _is_call(one: object) -> bool:
    match one:
        case [str(), [*_arguments]]:
            return True
    return False


def count_starts(keys: Sequence[str], *, by: int = 1) -> list[int]:
    """Count a start of each child; return their starts without an end."""
    with client.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.hincrby(STARTED_CHILDREN_KEY, key, by)
        counts: list[int] = pipe.execute()
    return counts


def forget_children(message: MessageProxy, *, starts: bool) -> None:
    """Let the children of the message be sent again, and forget their *starts*, too.

    Redis does that in this thread's next request: the acknowledgement, or the sending of a successor.
    """
    keys = [key for key, _ in list_calls(message)]
    for entries in (QUEUED_CHILDREN_KEY, STARTED_CHILDREN_KEY) if starts else (QUEUED_CHILDREN_KEY,):
        client.postpone("HDEL", entries, *keys)


def send_children(
    broker: RedisBroker,
    run: int | None,
    child: ChildSpec,
    keyed_args: Sequence[KeyedArguments],
    *,
    limit_depth: int | None,
    per_message: int = 1,
) -> EnqueueCounts:
    """Send *child* a message of the *run* for each pair of key and arguments, or for each *per_message* pairs.

    All messages are sent in one transaction.  A key with a message on its way or a row in quarantine gets none.  If two
    processes send at once, both may send.  Nothing is sent if *limit_depth* messages wait in the queue.  Raises
    `redis.RedisError` if nothing was sent, or if everything was sent and the reply was lost.
    """
    client, queue, wanted = broker.client, child.queue, dict(keyed_args)
    if limit_depth is not None and client.llen(ready_key(queue)) >= limit_depth:
        return EnqueueCounts(queue_full=True)
    if not wanted:
        return EnqueueCounts()
    found: Any = client.hmget(QUEUED_CHILDREN_KEY, list(wanted))
    sent = {key: sent_as for key, sent_as in zip(wanted, found, strict=True) if sent_as is not None}
    kept: Any = client.hmget(bodies_key(queue), list(sent.values())) if sent else []
    left_out = {key for key, body in zip(sent, kept, strict=True) if body is not None}
    failed = quarantine.find_failed_keys(child.batch.name, child.name, wanted)
    left_out |= {key for key, waits in failed.items() if waits}
    calls = [(key, arguments) for key, arguments in wanted.items() if key not in left_out]
    parts = [calls[start : start + per_message] for start in range(0, len(calls), per_message)]
    enqueue_children(broker, child, parts, run, failed=failed)
    return EnqueueCounts(len(calls), len(keyed_args) - len(calls))


def enqueue_children(
    broker: RedisBroker,
    child: ChildSpec,
    parts: Sequence[Sequence[KeyedArguments]],
    run: int | None,
    *,
    failed: Container[str],
) -> None:
    """Send a message for each of *parts*, all in one transaction; *failed* are keys of children that have failed."""
    if not parts:
        return
    # The same keys as Dramatiq's own `enqueue`, which sends one message at a time.
    bodies: Any = {}
    sent_as: Any = {}
    for calls in parts:
        message = build_child_message(child, calls, run, has_failed=any(key in failed for key, _ in calls))
        number = message.options["redis_message_id"]
        bodies[number] = message.encode()
        sent_as |= dict.fromkeys((key for key, _ in calls), number)
    with broker.client.pipeline(transaction=True) as pipe:
        pipe.hset(bodies_key(child.queue), mapping=bodies)
        pipe.rpush(ready_key(child.queue), *bodies)
        pipe.hset(QUEUED_CHILDREN_KEY, mapping=sent_as)
        pipe.execute()
