"""Uploads whose objects could not be deleted: a person lists, retries or discards them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import Any

import redis

from forgekeeper.api.inspection import RefusedEntry
from forgekeeper.platform.coordination.redis_values import decode_text, encode_text
from forgekeeper.sources.register.entries import DueEntry, UploadEntry
from forgekeeper.sources.register.keys import ENTRIES_PER_COMMAND
from forgekeeper.sources.register.redis_register import RedisRegister, typed_scores


class FailedUploads:
    """The entries of a register that have failed, for good or not."""

    def __init__(self, register: RedisRegister) -> None:
        self._register, self._keys = register, register.keys

    def count(self, client: redis.Redis) -> int:
        """Count the entries that have failed for good."""
        return int(client.zcard(self._keys.failed))

    def list_entries(
        self, client: redis.Redis, explain: Callable[[UploadEntry], str], limit: int
    ) -> Iterator[RefusedEntry]:
        """Yield entries that have failed for good, the oldest first, then entries to be retried.

        At most *limit* entries of each kind.
        """
        found = typed_scores(client.zrange(self._keys.failed, 0, limit - 1, withscores=True))
        for entry, since, _ in self._register.load_due_entries(client, found):
            yield RefusedEntry(entry.member, explain(entry), entry.attempts, since)
        for entry, since, _ in islice(self._list_retried(client), limit):
            yield RefusedEntry(entry.member, explain(entry), entry.attempts, None, since)

    def retry(self, client: redis.Redis, members: Collection[str] | None = None) -> int:
        """Retry failed *members* or all failed entries, except claimed ones; return the number.

        The entries may have failed for good or not.
        """
        if members is None:
            for_good: Any = client.zrange(self._keys.failed, 0, -1)
            members = [*map(decode_text, for_good), *(entry.member for entry, _, _ in self._list_retried(client))]
        return sum(self._register.settle(client, "retry", members))

    def discard(self, client: redis.Redis, members: Collection[str] | None = None) -> int:
        """Remove *members* that have failed for good, or all such entries; return the number.

        Their objects are not deleted.
        """
        chosen: Any = [encode_text(one) for one in members or ()]
        if members is None:
            chosen = client.zrange(self._keys.failed, 0, -1)
        # The removal decides who discards the entry; nobody else touches the rest of it.
        forgotten = [one for one in chosen if client.zrem(self._keys.failed, one)]
        for one in forgotten:
            client.hdel(self._keys.attempts, one)
            client.zrem(self._keys.adopted, one)
        return len(forgotten)

    def _list_retried(self, client: redis.Redis) -> Iterator[DueEntry]:
        """Yield the entries that have failed and will be retried, in the order of their due time."""
        start, size = 0, ENTRIES_PER_COMMAND
        while page := typed_scores(client.zrange(self._keys.deleting, start, start + size - 1, withscores=True)):
            yield from (due for due in self._register.load_due_entries(client, page) if due.entry.attempts)
            start += size
