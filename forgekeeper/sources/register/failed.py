"""Uploads whose objects could not be deleted: a person lists, retries or discards them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import Any

import redis

from forgekeeper.api.shown import Entry
from forgekeeper.platform.coordination.values import raw, text
from forgekeeper.sources.register.entries import DueEntry, UploadEntry
from forgekeeper.sources.register.keys import ENTRIES_PER_COMMAND
from forgekeeper.sources.register.redis_register import RedisRegister, scored


class FailedUploads:
    """The entries of a register that have failed, for good or not."""

    def __init__(self, register: RedisRegister) -> None:
        self._register, self._keys = register, register.keys

    def count(self, client: redis.Redis) -> int:
        """Count the entries that have failed for good."""
        return int(client.zcard(self._keys.failed))

    def entries(self, client: redis.Redis, explain: Callable[[UploadEntry], str], limit: int) -> Iterator[Entry]:
        """Yield up to *limit* entries that have failed for good, the oldest first, and as many that are tried again."""
        found = scored(client.zrange(self._keys.failed, 0, limit - 1, withscores=True))
        for entry, since, _ in self._register.dated(client, found):
            yield Entry(entry.member, explain(entry), entry.attempts, since)
        for entry, since, _ in islice(self._tried_again(client), limit):
            yield Entry(entry.member, explain(entry), entry.attempts, None, since)

    def retry(self, client: redis.Redis, members: Collection[str] | None = None) -> int:
        """Retry *members* that have failed, for good or not, or all, except claimed entries; return how many."""
        if members is None:
            for_good: Any = client.zrange(self._keys.failed, 0, -1)
            members = [*map(text, for_good), *(entry.member for entry, _, _ in self._tried_again(client))]
        return sum(self._register.settle(client, "retry", members))

    def discard(self, client: redis.Redis, members: Collection[str] | None = None) -> int:
        """Forget *members* that have failed for good, or all that have; return how many.  Their objects stay."""
        chosen: Any = [raw(one) for one in members or ()]
        if members is None:
            chosen = client.zrange(self._keys.failed, 0, -1)
        # The removal decides who has the entry; the rest of it is nobody else's then.
        forgotten = [one for one in chosen if client.zrem(self._keys.failed, one)]
        for one in forgotten:
            client.hdel(self._keys.attempts, one)
            client.zrem(self._keys.adopted, one)
        return len(forgotten)

    def _tried_again(self, client: redis.Redis) -> Iterator[DueEntry]:
        """Yield the entries that have failed and are tried again, in the order in which they are due."""
        start, size = 0, ENTRIES_PER_COMMAND
        while page := scored(client.zrange(self._keys.deleting, start, start + size - 1, withscores=True)):
            yield from (due for due in self._register.dated(client, page) if due.entry.attempts)
            start += size
