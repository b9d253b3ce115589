"""Uploads whose objects could not be deleted: a person sees them, retries or discards them (batch 100)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

import redis

from forgekeeper.api import shown
from forgekeeper.platform.coordination.values import raw, text
from forgekeeper.platform.settings import Settings
from workers.stale_direct_uploads.entries import UNFIT, Entry, unfit
from workers.stale_direct_uploads.keys import ADOPTED, ATTEMPTS, DELETING, FAILED, PAGE
from workers.stale_direct_uploads.register import Due, dated, scored, settle


def failures(client: redis.Redis, settings: Settings, limit: int) -> Iterator[shown.Entry]:
    """Yield up to *limit* entries that have failed for good, the oldest first, and as many that are tried again."""

    def why(entry: Entry) -> str:
        return UNFIT.get(unfit(entry, settings) or "", "the store refused to delete it: the log says why")

    for entry, since, _ in dated(client, scored(client.zrange(FAILED, 0, limit - 1, withscores=True))):
        yield shown.Entry(entry.member, why(entry), entry.attempts, since)
    for entry, since, _ in islice(_failing(client), limit):
        yield shown.Entry(entry.member, why(entry), entry.attempts, None, since)


def retry(client: redis.Redis, members: Collection[str] | None = None) -> int:
    """Retry *members* that have failed, for good or not, or all, but what a run has claimed; return how many."""
    if members is None:
        for_good: Any = client.zrange(FAILED, 0, -1)
        members = [*map(text, for_good), *(entry.member for entry, _, _ in _failing(client))]
    return sum(settle(client, "retry", members))


def discard(client: redis.Redis, members: Collection[str] | None = None) -> int:
    """Forget *members* that have failed for good, or all that have; return how many.  Their objects stay."""
    chosen: Any = client.zrange(FAILED, 0, -1) if members is None else [raw(member) for member in members]
    # The removal decides whose it is; what is known of it beside is nobody else's then.
    forgotten = [one for one in chosen if client.zrem(FAILED, one)]
    for one in forgotten:
        client.hdel(ATTEMPTS, one)
        client.zrem(ADOPTED, one)
    return len(forgotten)


def _failing(client: redis.Redis) -> Iterator[Due]:
    """Yield the entries that have failed and are tried again, those due first at the head."""
    start = 0
    while page := scored(client.zrange(DELETING, start, start + PAGE - 1, withscores=True)):
        yield from (due for due in dated(client, page) if due.entry.attempts)
        start += PAGE
