"""The forge's own register of direct uploads, a hash, out of which runs move what is stale (batch 100).

It is read only where `FORGEKEEPER_UPLOADS_REGISTER` is `hash`: elsewhere it is taken to be empty.  The forge writes a
field when an upload is prepared and deletes it when that completes; by the move a field becomes a pending entry, and
from then on no completion is seen.  So only what is claimed at once is moved, and everything else stays.

A hash has no order: it is read in pages, from its start to its end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import redis

from forgekeeper.platform.connections import Client, call
from forgekeeper.platform.coordination.values import raw, text, whole
from workers.stale_direct_uploads.keys import CURSOR, DUE_AT_AGE, LONGEST_AHEAD, PAGE, PENDING, REFERENCE

COUNTED = 200
"""So many pages are counted, in less than a second; of a larger hash it is what they make likely."""
SEARCHED = 1_000
"""So many pages are searched for something to move; the next run goes on there."""


class Count(NamedTuple):
    """How many uploads the forge has registered, are due and since when registered, and have a time that is none.

    *first* is one of these.
    """

    registered: int = 0
    due: int = 0
    oldest: int | None = None
    unreadable: int = 0
    first: str = ""


class _Page(NamedTuple):
    cursor: int
    seen: int
    due: int
    oldest: int | None
    unreadable: int
    first: str
    stale: list[tuple[bytes, bytes]]


def bridges(client: redis.Redis) -> bool:
    """Return whether the forge registers uploads in its hash, as the process of this client was set up."""
    settings = client.settings if isinstance(client, Client) else None
    return settings is not None and settings.uploads_register == "hash"


def size(client: redis.Redis) -> int:
    """Return how many uploads the forge has registered."""
    return client.hlen(REFERENCE) if bridges(client) else 0


def count(client: redis.Redis) -> Count:
    """Count what the forge has registered."""
    if not (registered := size(client)):
        return Count()
    pages = list(_pages(client, COUNTED, names=False))
    whole_of_it = pages[-1].cursor == 0
    share = 1.0 if whole_of_it else registered / max(1, sum(page.seen for page in pages))
    due, unreadable = round(share * sum(p.due for p in pages)), round(share * sum(p.unreadable for p in pages))
    oldest = min((page.oldest for page in pages if page.oldest is not None), default=None)
    return Count(registered, due, oldest, unreadable, max(page.first for page in pages))


def stale(client: redis.Redis) -> Iterator[list[tuple[bytes, float]]]:
    """Yield what `move` would move, page by page, with the seconds of their registration."""
    if bridges(client):
        for page in _pages(client, None, names=True):
            yield [(field, float(value)) for field, value in page.stale]


def move(client: redis.Redis, *, limit: int, only: Collection[bytes] | None = None) -> int:
    """Move up to *limit* stale uploads to those that are pending; return how many were, 0 where there is none.

    Where it is given, *only* those members are.  Each is moved in one atomic step, unless it has completed or was
    prepared again.  It begins where the last move has ended: what was left then comes when the hash is read from its
    start.  A crash afterwards leaves pending entries, which are claimed as others are.
    """
    if not bridges(client):
        return 0
    cursor = whole(client.get(CURSOR))
    moved, from_start = 0, cursor == 0
    for _ in range(SEARCHED):
        page = _page(client, cursor, names=True)
        some = [pair for pair in page.stale if only is None or pair[0] in only][: limit - moved]
        moved += (
            call(client, "upload_move", keys=[REFERENCE, PENDING], args=[*chain.from_iterable(some)]) if some else 0
        )
        cursor = page.cursor
        if moved == limit or (cursor == 0 and (moved or from_start)):
            break
        from_start = from_start or cursor == 0
    client.set(CURSOR, cursor)
    return moved


def named(client: redis.Redis, members: Sequence[str]) -> set[str]:
    """Return those of *members* that the forge has registered."""
    if not members or not bridges(client):
        return set()
    values: Any = client.hmget(REFERENCE, [*map(raw, members)])
    return {member for member, value in zip(members, values, strict=True) if value is not None}


def sampled(client: redis.Redis, number: int) -> list[bytes]:
    """Return some of what the forge has registered."""
    found: Any = client.hrandfield(REFERENCE, number) if bridges(client) else None
    return found or []


def _pages(client: redis.Redis, most: int | None, *, names: bool) -> Iterator[_Page]:
    cursor, number = 0, 0
    while most is None or number < most:
        page = _page(client, cursor, names=names)
        yield page
        cursor, number = page.cursor, number + 1
        if cursor == 0:
            return


def _page(client: redis.Redis, cursor: int, *, names: bool) -> _Page:
    ahead = int(LONGEST_AHEAD.total_seconds())
    args = [cursor, PAGE, DUE_AT_AGE, ahead, int(names)]
    position, seen, due, oldest, unreadable, first, found = call(client, "upload_stale", keys=[REFERENCE], args=args)
    pairs = list(zip(found[::2], found[1::2], strict=True))
    return _Page(int(position), seen, due, oldest if oldest != b"" else None, unreadable, text(first), pairs)
