"""The queues in Redis, as Dramatiq keeps them, and their messages.

Dramatiq's keys: the list `<namespace>:<queue>` has the ids of messages that no worker has fetched; the hash
`<queue>.msgs` has the body of each message until it is acknowledged; `<queue>.XQ` has messages that no worker could
read.  Nothing here asks the broker: it would count the asking process as a worker.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from datetime import datetime
from typing import Any

import redis

from forgekeeper.platform.coordination.redis_values import to_datetime

NAMESPACE = "forgekeeper"
QUEUED_CHILDREN_KEY = "forgekeeper:queued"
"""Hash, a child's key -> Dramatiq's id of the last message that was sent to it."""
STARTED_CHILDREN_KEY = "forgekeeper:started"
"""Hash, a child's key -> its starts without an end."""
HEARTBEATS_KEY = f"{NAMESPACE}:__heartbeats__"


def ready_key(queue: str) -> str:
    """Name the list of ids that no worker has fetched."""
    return f"{NAMESPACE}:{queue}"


def bodies_key(queue: str) -> str:
    """Name the hash of the bodies of messages that are not acknowledged."""
    return f"{NAMESPACE}:{queue}.msgs"


def dead_letters_key(queue: str) -> str:
    """Name the sorted set of messages that no worker could read."""
    return f"{NAMESPACE}:{queue}.XQ"


def list_fetched(client: redis.Redis, worker: str, queues: Collection[str]) -> list[tuple[str, str]]:
    """List the messages that the worker has fetched and not acknowledged: queue, Dramatiq's id."""
    with client.pipeline(transaction=False) as pipe:
        for queue in queues:
            pipe.smembers(f"{NAMESPACE}:__acks__.{worker}.{queue}")
        found = pipe.execute()
    return [(queue, one.decode(errors="replace")) for queue, ids in zip(queues, found, strict=True) for one in ids]


def required_key_types(queues: tuple[str, ...]) -> dict[str, str]:
    """Return every key that is not a single worker's, with the type that it must have."""
    found = {QUEUED_CHILDREN_KEY: "hash", STARTED_CHILDREN_KEY: "hash", HEARTBEATS_KEY: "zset"}
    for queue in queues:
        found |= {ready_key(queue): "list", bodies_key(queue): "hash", dead_letters_key(queue): "zset"}
    return found


def count_messages(client: redis.Redis, queue: str) -> dict[str, int]:
    """Count the queue's waiting messages and the messages that a worker has fetched.

    `delayed` messages are from an older version; Dramatiq sends them at their time.
    """
    with client.pipeline(transaction=False) as pipe:
        pipe.llen(ready_key(queue))
        pipe.hlen(bodies_key(queue))
        pipe.hlen(bodies_key(f"{queue}.DQ"))
        waiting, stored, delayed = pipe.execute()
    return {"ready": waiting, "in_flight": max(0, stored - waiting), "delayed": delayed}


def due_since(client: redis.Redis, queue: str) -> datetime | None:
    """Return when the queue's first message was sent; None if it is missing or unreadable."""
    head: Any = client.lindex(ready_key(queue), 0)
    body: Any = client.hget(bodies_key(queue), head or "")
    try:
        return to_datetime(json.loads(body or "")["message_timestamp"] / 1000)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
