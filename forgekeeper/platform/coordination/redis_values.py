"""Parsers of values in Redis, which other programs may have written: no value is an error.

A malformed value becomes the nearest valid value, so people can see and remove it, and it stops nothing else.  Keys of
a wrong type are reported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

import redis

KEY_TYPES: dict[str, str] = {}
"""Type of each of our keys, added by the module that uses the key; with a key of another type nothing works."""
FIRST_MOMENT = datetime(1, 1, 2, tzinfo=UTC)
LAST_MOMENT = datetime(9999, 12, 30, tzinfo=UTC)
"""First and last instant that can be written in every time zone."""
FIRST_SECOND, LAST_SECOND = FIRST_MOMENT.timestamp(), LAST_MOMENT.timestamp()

_COUNT_PATTERN = re.compile(rb"[0-9]{1,15}")


def decode_text(value: bytes) -> str:
    """Decode a value; bytes that are not UTF-8 become surrogates, which `encode_text` restores."""
    return value.decode(errors="surrogateescape")


def encode_text(value: str) -> bytes:
    """Encode a text that `text` has decoded, to the same bytes."""
    return value.encode(errors="surrogateescape")


def parse_count(value: str | bytes | None) -> int:
    """Parse a count; return 0 if the value is malformed."""
    return int(value) if value is not None and is_count(value) else 0


def is_count(value: str | bytes) -> bool:
    """Return whether the value is a valid count: bytes of 1 to 15 digits."""
    return isinstance(value, bytes) and _COUNT_PATTERN.fullmatch(value) is not None


def parse_second(value: bytes | float) -> int:
    """Parse an epoch second; return 0 if it is malformed or outside the range of `moment`."""
    try:
        number = float(value)
    except ValueError:
        return 0
    return math.floor(number) if 0 <= number <= LAST_SECOND else 0


def to_datetime(seconds: float) -> datetime:
    """Return the instant of an epoch second, or outside the range `FIRST_MOMENT` or `LAST_MOMENT`."""
    if not seconds > FIRST_SECOND:
        return FIRST_MOMENT
    return LAST_MOMENT if seconds >= LAST_SECOND else datetime.fromtimestamp(seconds, UTC)


def find_wrong_types(client: redis.Redis, types: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each key that exists with another type than in *types*."""
    with client.pipeline(transaction=False) as pipe:
        for name in types:
            pipe.type(name)
        found = [answer.decode(errors="replace") for answer in pipe.execute()]
    for (name, wanted), kind in zip(types.items(), found, strict=True):
        if kind not in {"none", wanted}:
            yield (
                f"the key {name} is a {kind}, but must be a {wanted}: another program has written it; "
                "RENAME it, or DEL it if nothing needs it"
            )
