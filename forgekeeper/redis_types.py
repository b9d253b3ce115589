"""What type each key of ours is: where another program has written one of another type, nothing works."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import redis

from forgekeeper.delivery import queues as delivery

_declared: dict[str, str] = {}


def declare(types: Mapping[str, str]) -> None:
    """Make known keys beside those of the delivery, and their types."""
    _declared.update(types)


def misfits(client: redis.Redis, queues: tuple[str, ...]) -> Iterator[str]:
    """Name those keys of ours that are of another type than they have to be, a sentence each."""
    types = _declared | delivery.types(queues)
    with client.pipeline(transaction=False) as pipe:
        for name in types:
            pipe.type(name)
        found = [answer.decode(errors="replace") for answer in pipe.execute()]
    for (name, wanted), kind in zip(types.items(), found, strict=True):
        if kind not in {"none", wanted}:
            yield (
                f"the key {name} is a {kind}, and has to be a {wanted}: another program has written it; "
                "RENAME it, or DEL it where nobody needs it"
            )
