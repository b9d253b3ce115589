"""The forge's own register of uploads, a hash; runs move stale entries out of it.

It is read only if `FORGEKEEPER_UPLOADS_REGISTER` is `hash`; otherwise it counts as empty.  The forge writes a field
when an upload is prepared and deletes the field when the upload completes.  The move makes a field a pending entry, and
no completion is seen afterwards.  So a run moves only the entries that it claims at once.

A hash is unordered: it is read in pages, from its start to its end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import redis

from forgekeeper.platform.connections import RedisClient, run_script
from forgekeeper.platform.coordination.redis_values import decode_text, encode_text, parse_count
from forgekeeper.sources.register.keys import ENTRIES_PER_COMMAND, MAX_TIME_AHEAD, RegisterKeys

MAX_COUNTED_PAGES = 200
"""Pages that are counted, in less than a second.  The counts of a larger hash are estimated from these."""
MAX_SEARCHED_PAGES = 1_000
"""Pages that are searched for stale entries in one move.  The next move continues at the same position."""


class HashCount(NamedTuple):
    """Counts of the forge's uploads: registered, due (and the second of the oldest), without a valid time.

    *unreadable_example* is an example of the last.
    """

    registered: int = 0
    due: int = 0
    oldest: int | None = None
    unreadable: int = 0
    unreadable_example: str = ""


class _HashPage(NamedTuple):
    cursor: int
    seen: int
    due: int
    oldest: int | None
    unreadable: int
    unreadable_example: str
    stale: list[tuple[bytes, bytes]]


class Bridge:
    """The forge's hash beside a register; a field is due *due_at_age* seconds after its registration."""

    def __init__(self, keys: RegisterKeys, due_at_age: int) -> None:
        self._keys, self._due_at_age = keys, due_at_age

    def is_open(self, client: redis.Redis) -> bool:
        """Return whether the forge registers uploads in its hash, by the settings of the client's process."""
        settings = client.settings if isinstance(client, RedisClient) else None
        return settings is not None and settings.uploads_register == "hash"

    def count_registered(self, client: redis.Redis) -> int:
        """Return how many uploads the forge has registered."""
        return client.hlen(self._keys.hash) if self.is_open(client) else 0

    def count_by_state(self, client: redis.Redis) -> HashCount:
        """Count the uploads that the forge has registered."""
        if not (registered := self.count_registered(client)):
            return HashCount()
        pages = list(self._read_pages(client, MAX_COUNTED_PAGES, with_names=False))
        share = 1.0 if pages[-1].cursor == 0 else registered / max(1, sum(page.seen for page in pages))
        due, unreadable = (
            round(share * sum(some)) for some in zip(*((p.due, p.unreadable) for p in pages), strict=True)
        )
        oldest = min((page.oldest for page in pages if page.oldest is not None), default=None)
        return HashCount(registered, due, oldest, unreadable, max(page.unreadable_example for page in pages))

    def read_stale_pages(self, client: redis.Redis) -> Iterator[list[tuple[bytes, float]]]:
        """Yield the fields that `move_stale` would move, page by page, with the seconds of their registration."""
        if self.is_open(client):
            for page in self._read_pages(client, None, with_names=True):
                yield [(field, float(value)) for field, value in page.stale]

    def move_stale(self, client: redis.Redis, *, limit: int, only: Collection[bytes] | None = None) -> int:
        """Move up to *limit* stale uploads to the pending entries; return their number, 0 if none is stale.

        If *only* is given, other members are left.  Each field is moved in one atomic step, unless it has completed or
        was prepared again.  The search begins at the end position of the last move; earlier fields follow when the
        search restarts at the beginning.  A crash afterwards leaves pending entries, which are claimed like others.
        """
        if not self.is_open(client):
            return 0
        cursor = parse_count(client.get(self._keys.cursor))
        moved, from_start = 0, cursor == 0
        for _ in range(MAX_SEARCHED_PAGES):
            page = self._read_page(client, cursor, with_names=True)
            some = [pair for pair in page.stale if only is None or pair[0] in only][: limit - moved]
            moved += self._move_fields(client, some) if some else 0
            cursor = page.cursor
            if moved == limit or (cursor == 0 and (moved or from_start)):
                break
            from_start = from_start or cursor == 0
        client.set(self._keys.cursor, cursor)
        return moved

    def _move_fields(self, client: redis.Redis, fields: Sequence[tuple[bytes, bytes]]) -> int:
        keys = [self._keys.hash, self._keys.pending]
        return int(run_script(client, "upload_move", keys=keys, args=[*chain.from_iterable(fields)]))

    def find_registered(self, client: redis.Redis, members: Sequence[str]) -> set[str]:
        """Return the *members* that the forge has registered."""
        if not members or not self.is_open(client):
            return set()
        values: Any = client.hmget(self._keys.hash, [*map(encode_text, members)])
        return {member for member, value in zip(members, values, strict=True) if value is not None}

    def sample_members(self, client: redis.Redis, number: int) -> list[bytes]:
        """Return some members that the forge has registered."""
        found: Any = client.hrandfield(self._keys.hash, number) if self.is_open(client) else None
        return found or []

    def _read_pages(self, client: redis.Redis, max_pages: int | None, *, with_names: bool) -> Iterator[_HashPage]:
        cursor, number = 0, 0
        while max_pages is None or number < max_pages:
            page = self._read_page(client, cursor, with_names=with_names)
            yield page
            cursor, number = page.cursor, number + 1
            if cursor == 0:
                return

    def _read_page(self, client: redis.Redis, cursor: int, *, with_names: bool) -> _HashPage:
        ahead = int(MAX_TIME_AHEAD.total_seconds())
        args = [cursor, ENTRIES_PER_COMMAND, self._due_at_age, ahead, int(with_names)]
        answer = run_script(client, "upload_stale", keys=[self._keys.hash], args=args)
        position, seen, due, oldest, unreadable, first, found = answer
        pairs = list(zip(found[::2], found[1::2], strict=True))
        return _HashPage(
            int(position), seen, due, oldest if oldest != b"" else None, unreadable, decode_text(first), pairs
        )
