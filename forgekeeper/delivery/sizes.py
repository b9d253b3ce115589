"""How large a message may be: what is larger is not put in, and what another program has put in is not fetched.

Whoever decodes a body of fifty megabytes does nothing else for a second, and neither do the
other threads of its process.  Our own messages have a few hundred bytes, with the trace of an
error a few thousand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

LARGEST = 1_000_000
"""Bytes of a body that may be put in."""
LARGEST_FETCHED = LARGEST + 100_000
"""Bytes of id and body that may be fetched: a message gathers options, and a trace, on its way."""
AT_ONCE = 10_000_000
"""Bytes of bodies that are read at once by who only looks at them."""
TOO_LARGE = "too_large"
"""The reason of a dead letter that was not fetched."""


class MessageTooLarge(ValueError):
    """A message cannot be put in; it says which, and what to do instead."""


def fitting(body: bytes, *, actor: str, message_id: str) -> bytes:
    """Return *body*; raise `MessageTooLarge` when it cannot be put in."""
    if len(body) > LARGEST:
        raise MessageTooLarge(
            f"message {message_id[:100]} of {actor} has {len(body):,} bytes, and may have {LARGEST:,}: "
            "keep the data where it can be looked up, and send its key"
        )
    return body


def groups(sizes: Sequence[int]) -> Iterator[range]:
    """Yield the positions of bodies of these *sizes*, some at a time; what is too large is not going to be read."""
    begin = room = 0
    for position, size in enumerate(sizes):
        room += size if size <= LARGEST_FETCHED else 0
        if room > AT_ONCE:
            yield range(begin, position)
            begin, room = position, size
    if begin < len(sizes):
        yield range(begin, len(sizes))
