"""Direct uploads that could not be deleted: listed for a person, retried and discarded (batch 100)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import count, islice
from typing import Any

import redis

from forgekeeper.coordination.values import moment, raw, text, whole
from forgekeeper.declaring import shown
from forgekeeper.settings import Settings
from workers.stale_direct_uploads import register
from workers.stale_direct_uploads.entries import UNFIT, Entry, unfit
from workers.stale_direct_uploads.register import ADOPTED, ATTEMPTS, DELETING, FAILED, PAGE


def entries(client: redis.Redis, settings: Settings, limit: int) -> Iterator[shown.Entry]:
    """Yield up to *limit* entries that have failed for good, the oldest first, and as many that are tried again."""

    def why(entry: Entry) -> str:
        return UNFIT.get(unfit(entry, settings) or "", "the store refused to delete it: the log says why")

    for member, score in _scored(client, FAILED, 0, limit):
        entry = Entry(text(member), whole(client.hget(ATTEMPTS, member)))
        yield shown.Entry(entry.member, why(entry), entry.attempts, moment(score))
    for entry, score in islice(_failing(client), limit):
        yield shown.Entry(entry.member, why(entry), entry.attempts, None, moment(score))


def retry(client: redis.Redis, members: Collection[str] | None = None) -> int:
    """Retry *members* that have failed, or all that have; return how many.  What a run has claimed is left to it."""
    if members is None:
        for_good: Any = client.zrange(FAILED, 0, -1)
        members = [*map(text, for_good), *(entry.member for entry, _ in _failing(client))]
    return register.retry(client, members)


def discard(client: redis.Redis, members: Collection[str] | None = None) -> int:
    """Forget *members* that have failed for good, or all that have; return how many.  Their objects stay."""
    chosen: Any = client.zrange(FAILED, 0, -1) if members is None else [raw(member) for member in members]
    # The removal decides whose it is; what is known of it beside is nobody else's then.
    forgotten = [one for one in chosen if client.zrem(FAILED, one)]
    for one in forgotten:
        client.hdel(ATTEMPTS, one)
        client.zrem(ADOPTED, one)
    return len(forgotten)


def _failing(client: redis.Redis) -> Iterator[tuple[Entry, float]]:
    """Yield the entries that have failed and are tried again, and when, those due first at the head."""
    for start in count(0, PAGE):
        page = _scored(client, DELETING, start, PAGE)
        if not page:
            return
        attempts = client.hmget(ATTEMPTS, [member for member, _ in page])
        yield from (
            (Entry(text(member), whole(tried)), score)
            for (member, score), tried in zip(page, attempts, strict=True)
            if tried
        )


def _scored(client: redis.Redis, key: str, start: int, size: int) -> list[tuple[Any, float]]:
    found: Any = client.zrange(key, start, start + size - 1, withscores=True)
    return list(found)
