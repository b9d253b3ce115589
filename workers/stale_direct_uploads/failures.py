"""Direct uploads that could not be deleted: listed for a person, and retried (batch 100)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import count
from typing import Any

import redis

from forgekeeper.coordination.scripts import call
from forgekeeper.coordination.values import moment, raw, text, whole
from forgekeeper.declaring.refused import Entry
from forgekeeper.settings import Settings
from forgekeeper.storage.objects import OUTSIDE, is_below, is_normal
from workers.stale_direct_uploads.entries import Failure
from workers.stale_direct_uploads.register import ADOPTED, ATTEMPTS, CLAIMS, DELETING, FAILED

PAGE = 1_000
"""Entries in one command, which takes about a millisecond of the server."""


def failed(client: redis.Redis, limit: int) -> list[Failure]:
    """Return the entries that have failed for good, the oldest first."""
    found: Any = client.zrange(FAILED, 0, limit - 1, withscores=True)
    return [Failure(text(member), whole(client.hget(ATTEMPTS, member)), at=moment(score)) for member, score in found]


def failing(client: redis.Redis) -> list[Failure]:
    """Return the entries that have failed and are tried again, those due first at the head."""
    found = []
    for page in _pages(client, DELETING):
        attempts = client.hmget(ATTEMPTS, [member for member, _ in page])
        found += [
            Failure(text(member), whole(tried), again=moment(score))
            for (member, score), tried in zip(page, attempts, strict=True)
            if tried
        ]
    return found


def all_failed(client: redis.Redis) -> list[str]:
    """Return all entries that have failed, for good or not."""
    for_good: Any = client.zrange(FAILED, 0, -1)
    return [*map(text, for_good), *(failure.member for failure in failing(client))]


def retry(client: redis.Redis, members: Collection[str] | None = None) -> int:
    """Retry *members* that have failed, or all that have; return how many there were.

    An entry that a run has claimed is left to that run.
    """
    chosen = [raw(member) for member in (all_failed(client) if members is None else members)]
    keys = [DELETING, FAILED, ATTEMPTS, CLAIMS]
    return sum(call(client, "upload_retry", keys=keys, args=chosen[n : n + PAGE]) for n in range(0, len(chosen), PAGE))


def discard(client: redis.Redis, members: Collection[str] | None = None) -> int:
    """Forget *members* that have failed for good, or all that have; return how many.  Their objects stay."""
    chosen: Any = client.zrange(FAILED, 0, -1) if members is None else [raw(member) for member in members]
    # The removal decides whose it is; what is known of it beside is nobody else's then.
    forgotten = [one for one in chosen if client.zrem(FAILED, one)]
    for one in forgotten:
        client.hdel(ATTEMPTS, one)
        client.zrem(ADOPTED, one)
    return len(forgotten)


def refused(client: redis.Redis, settings: Settings, limit: int) -> Iterator[Entry]:
    """Yield up to *limit* entries that have failed for good, and as many that are tried again."""
    for one in [*failed(client, limit), *failing(client)[:limit]]:
        yield Entry(one.member, why(one, settings), one.attempts, one.at, one.again)


def why(failure: Failure, settings: Settings) -> str:
    """Say why the entry could not be deleted, by these settings; what a store has said is in the log."""
    if failure.malformed or not is_normal(failure.path):
        return "it names no object"
    if failure.location not in settings.object_stores:
        return f"no store is configured for {failure.location}"
    within = is_below(settings.object_prefixes.get(failure.location, ()), failure.path)
    return "the store refused to delete it: the log says why" if within else f"it is {OUTSIDE}"


def _pages(client: redis.Redis, key: str) -> Iterator[list[tuple[bytes, float]]]:
    """Yield the members and scores of a sorted set, a thousand at a time."""
    for start in count(0, PAGE):
        page: Any = client.zrange(key, start, start + PAGE - 1, withscores=True)
        if not page:
            return
        yield page
