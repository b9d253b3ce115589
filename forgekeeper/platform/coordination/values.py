"""Read what lies in Redis, where anybody may have written anything: no value raises, a key of another type is named.

What is nonsense becomes the nearest thing that makes sense, so that it can be seen and removed, and stops nothing else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

import redis

DECLARED: dict[str, str] = {}
"""What type each key of ours has to be of, which the module that uses it adds: of another type nothing works."""
FIRST = datetime(1, 1, 2, tzinfo=UTC)
LAST = datetime(9999, 12, 30, tzinfo=UTC)
"""The instants that every time zone can write."""

_WHOLE = re.compile(rb"[0-9]{1,15}")


def text(value: bytes) -> str:
    """Return what stands there; bytes that are no text stay what they are, for `raw`."""
    return value.decode(errors="surrogateescape")


def raw(value: str) -> bytes:
    """Return the bytes of what `text` has read."""
    return value.encode(errors="surrogateescape")


def whole(value: str | bytes | None) -> int:
    """Return a count; 0 for what is none."""
    return int(value) if value is not None and is_whole(value) else 0


def is_whole(value: str | bytes) -> bool:
    """Say whether this is how a count, or a small number from 0 on, is written."""
    return isinstance(value, bytes) and _WHOLE.fullmatch(value) is not None


def second(value: bytes | float) -> int:
    """Return an epoch second; 0 for what is none, or is not within the years of `moment`."""
    try:
        number = float(value)
    except ValueError:
        return 0
    return math.floor(number) if 0 <= number <= LAST.timestamp() else 0


def moment(seconds: float) -> datetime:
    """Return the instant of an epoch second; beyond what Python holds the first or the last."""
    if not seconds > FIRST.timestamp():
        return FIRST
    return LAST if seconds >= LAST.timestamp() else datetime.fromtimestamp(seconds, UTC)


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
