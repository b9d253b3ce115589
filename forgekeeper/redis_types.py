"""What type each key of ours is: where another program has written one of another type, nothing works."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import redis

from forgekeeper.delivery import keys as delivery

_declared: dict[str, str] = {}


def declare(types: Mapping[str, str]) -> None:
    """Make known keys beside those of the delivery, and their types."""
    _declared.update(types)


def keys(namespace: str, queues: Iterable[str]) -> list[str]:
    """List our keys, but for those of each worker."""
    return [*_declared, *delivery.names(namespace, queues)]


def misfits(client: redis.Redis, names: Sequence[str | bytes]) -> Iterator[str]:
    """Name those of the keys that are of another type than they have to be, a sentence each."""
    with client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.type(name)
        found = [answer.decode(errors="replace") for answer in pipe.execute()]
    for name, kind in zip(map(_text, names), found, strict=True):
        if kind not in {"none", type_of(name)}:
            yield (
                f"the key {name} is a {kind}, and has to be a {type_of(name)}: another program has written it; "
                "RENAME it, or DEL it where nobody needs it"
            )


def type_of(name: str) -> str:
    """Return the type that Redis has to have for the key."""
    return _declared.get(name) or delivery.type_of(name)


def _text(name: str | bytes) -> str:
    return name if isinstance(name, str) else name.decode(errors="backslashreplace")
