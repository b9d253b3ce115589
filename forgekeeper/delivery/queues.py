"""What lies in the queues, read from their keys: nothing is asked of the broker, which would count us as a worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

import orjson
import redis

from forgekeeper.delivery.keys import QueueKeys
from forgekeeper.delivery.sizes import LARGEST_FETCHED, groups
from forgekeeper.redis_values import moment

PAGE = 1_000
DUE = "forgekeeper_due_ms"
"""The option in which a message that was delayed says until when: its timestamp is that of its first try."""


def depth(client: redis.Redis, namespace: str, queue: str) -> dict[str, int]:
    """Count the queue's messages: ready, in flight, delayed and dead."""
    keys = QueueKeys(namespace, queue)
    with client.pipeline(transaction=False) as pipe:
        pipe.llen(keys.ready)
        pipe.hlen(keys.bodies)
        pipe.hlen(keys.delayed.bodies)
        pipe.zcard(keys.dead)
        ready, stored, delayed, dead = pipe.execute()
    if keys.delayed == keys:
        delayed = 0  # what waits is in this queue, and counted already
    return {"ready": ready, "in_flight": max(0, stored - ready), "delayed": delayed, "dead": dead}


def due_since(client: redis.Redis, namespace: str, queue: str) -> datetime | None:
    """Return when the message at the head of the queue became due; None when the queue is empty.

    None, too, for a body that is no message, or too large to be one.
    """
    keys = QueueKeys(namespace, queue)
    head: Any = client.lindex(keys.ready, 0)
    message = _message(*_bodies(client, keys.bodies, [head])) if head is not None else {}
    options = message.get("options")
    due = (options.get(DUE) if isinstance(options, dict) else None) or message.get("message_timestamp")
    return moment(due / 1000) if isinstance(due, int | float) else None


def dead_by_actor(client: redis.Redis, namespace: str, queue: str, *, limit: int) -> Counter[str]:
    """Count the queue's dead letters by actor, reading up to about *limit*; what names no actor has the empty name."""
    found: Counter[str] = Counter()
    keys = QueueKeys(namespace, queue)
    for start in range(0, limit, PAGE):
        page: Any = client.zrange(keys.dead, start, start + PAGE - 1)
        found.update(actor_of(body) for body in _bodies(client, keys.dead_bodies, page))
        if len(page) < PAGE:
            break
    return found


def actor_of(body: Any) -> str:
    """Name the actor of a message; the empty name when the body is no message."""
    return str(_message(body).get("actor_name", ""))


def _bodies(client: redis.Redis, key: str, ids: Sequence[bytes]) -> Iterator[Any]:
    """Yield the bodies of the messages, None for each that is gone or too large."""
    with client.pipeline(transaction=False) as pipe:
        for one in ids:
            pipe.hstrlen(key, one)
        sizes = pipe.execute()
        for group in groups(sizes):
            wanted = [number for number in group if sizes[number] <= LARGEST_FETCHED]
            for number in wanted:
                pipe.hget(key, ids[number])
            found = dict(zip(wanted, pipe.execute(), strict=True))
            yield from (found.get(number) for number in group)


def _message(body: Any) -> dict[str, Any]:
    try:
        message = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError:
        return {}
    return message if isinstance(message, dict) else {}
