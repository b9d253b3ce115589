"""Uploads that people exclude by pattern: runs do not claim them, as a claimed upload cannot complete.

Exclusions are in PostgreSQL, and unknown to the register.  If the batch has any, the due entries are read in
the order of claims, and the others are claimed by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import redis

from forgekeeper.platform.database import exclusions
from forgekeeper.sources.register.entries import DueEntry, EntryCounts
from forgekeeper.sources.register.redis_register import RedisRegister


class UnexcludedEntries:
    """The entries of a register that nobody excludes from the *batch*."""

    def __init__(self, register: RedisRegister, batch: str) -> None:
        self._register, self._batch = register, batch

    def has_exclusions(self) -> bool:
        """Return whether any upload may be excluded."""
        return exclusions.has_exclusions(self._batch, "pattern")

    def drop_excluded(self, page: Sequence[DueEntry]) -> list[DueEntry]:
        """Return the entries of *page* that nobody excludes."""
        excluded = exclusions.find_excluded(self._batch, lambda: [(None, due.entry.member) for due in page])
        return [due for place, due in enumerate(page) if place not in excluded]

    def find_next_members(self, client: redis.Redis, limit: int) -> list[str]:
        """Return the members that a run may claim next, up to *limit*."""
        found = list[str]()
        for page in self._read_due_pages(client):
            found += [due.entry.member for due in page]
            if len(found) >= limit:
                break
        return found[:limit]

    def count_entries(self, client: redis.Redis) -> EntryCounts:
        """Count the entries; excluded entries do not count as due."""
        counted = self._register.count_entries(client)
        if not self.has_exclusions():
            return counted
        since = [due.since for page in self._read_due_pages(client) for due in page]
        return counted._replace(due=len(since), due_since=min(since, default=None))

    def _read_due_pages(self, client: redis.Redis) -> Iterator[list[DueEntry]]:
        return map(self.drop_excluded, self._register.read_due_pages(client))
