"""What type each key of ours has to be of: where another program has written one of another type, nothing works."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import redis

DECLARED: dict[str, str] = {}
"""The type of each key, which the module that uses it adds."""


def misfits(client: redis.Redis, types: Mapping[str, str]) -> Iterator[str]:
    """Name those of the keys that are of another type than they have to be, a sentence each."""
    with client.pipeline(transaction=False) as pipe:
        for name in types:
            pipe.type(name)
        found = [answer.decode(errors="replace") for answer in pipe.execute()]
    for (name, wanted), kind in zip(types.items(), found, strict=True):
        if kind not in {"none", wanted}:
            yield (
                f"the key {name} is a {kind}, and has to be a {wanted}: another program has written it; "
                "RENAME it, or DEL it where nothing needs it"
            )
