"""What lies in the queues, read from their keys: nothing is asked of the broker, which would count us as a worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import orjson
import redis

from forgekeeper.delivery.keys import QueueKeys
from forgekeeper.delivery.sizes import LARGEST_FETCHED, groups
from forgekeeper.redis_values import moment

PAGE = 1_000
DUE = "forgekeeper_due_ms"
"""The option in which a message that was delayed says until when: its timestamp is that of its first try."""

RUN = "forgekeeper_run"
"""The option in which a child's message says which run has sent it."""
LOOKED_AT = 10_000
"""How many messages of a queue are read to find those of a run."""


class OfRun(NamedTuple):
    """A run's messages of an actor that have not ended; *delayed* has those that wait, and until when."""

    queued: list[str]
    delayed: dict[str, datetime]
    dead: list[str]


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


def of_run(client: redis.Redis, namespace: str, queue: str, actor: str, run: int) -> OfRun | None:
    """Find the messages that the *run* has sent the actor; None where the queue has more than can be looked through."""
    keys = QueueKeys(namespace, queue)
    places = keys.bodies, keys.delayed.bodies, keys.dead_bodies
    if any(client.hlen(place) > LOOKED_AT for place in places):
        return None
    queued, delayed, dead = ([one for one in _messages(client, place) if _is_of(one, actor, run)] for place in places)
    etas = {_id(one): one["options"].get("eta") for one in delayed}
    waiting = {key: moment(eta / 1000 if isinstance(eta, int) else 0) for key, eta in etas.items()}
    return OfRun([_id(one) for one in queued], waiting, [_id(one) for one in dead])


def _messages(client: redis.Redis, key: str) -> Iterator[dict[str, Any]]:
    ids: Any = client.hkeys(key)
    return map(_message, _bodies(client, key, ids)) if ids else iter(())


def _is_of(message: dict[str, Any], actor: str, run: int) -> bool:
    options = message.get("options")
    return message.get("actor_name") == actor and isinstance(options, dict) and str(options.get(RUN)) == str(run)


def _id(message: dict[str, Any]) -> str:
    return str(message.get("message_id"))


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
