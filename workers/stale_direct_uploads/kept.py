"""Uploads that people exclude by pattern (batch 100): they are not claimed, as what is claimed cannot complete.

The register knows nothing of exclusions, which are in PostgreSQL.  While one stands for the batch, its entries are read
in the order in which they are claimed, and those that are not excluded are claimed by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import redis

from forgekeeper.platform.database import exclusions
from workers.stale_direct_uploads import register
from workers.stale_direct_uploads.register import Census, Due

BATCH = "stale_direct_uploads"


def any_stand() -> bool:
    """Say whether any upload may be excluded."""
    return exclusions.stand(BATCH, "pattern")


def not_excluded(page: Sequence[Due]) -> list[Due]:
    """Return those that nobody excludes."""
    kept = exclusions.among(BATCH, lambda: [(None, due.entry.member) for due in page])
    return [due for place, due in enumerate(page) if place not in kept]


def next_members(client: redis.Redis, limit: int) -> list[str]:
    """Return the members that a run may claim next, up to *limit*."""
    found = list[str]()
    for page in _pages(client):
        found += [due.entry.member for due in page]
        if len(found) >= limit:
            break
    return found[:limit]


def census(client: redis.Redis) -> Census:
    """Count the entries; of those that are due the ones that nobody excludes."""
    counted = register.census(client)
    if not any_stand():
        return counted
    since = [due.since for page in _pages(client) for due in page]
    return counted._replace(due=len(since), due_since=min(since, default=None))


def _pages(client: redis.Redis) -> Iterator[list[Due]]:
    return map(not_excluded, register.due(client))
