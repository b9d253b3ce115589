"""`Buckets`: equal shares of a batch's rows; one child at a time works on a share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field

from forgekeeper.api.mistakes import Mistake

BUCKET_COUNT_FIELDS = ("max_buckets", "available_count", "occupied_count", "stale_count", "missing_count")
"""Fields of the parent's result: the limit, and the buckets as it found them."""
LOOP_LIMIT_REASON = "loop_limit"
"""Reason why a child stopped after its number of chunks."""


@dataclass(frozen=True)
class Buckets:
    """The capacity of a batch: *count* shares of its rows; one child at a time works on a share.

    *count_with* has another count by the name of a flag: the highest count whose flag is on.  Flags are read at each
    run; while the batch's own *flag* is off, buckets do not exist.  A child claims a free bucket, deletes the rows of
    its classes (`Classes`), *loop_limit* chunks at most, and gives the bucket back on every way out.  A bucket whose
    owner is silent for ``FORGEKEEPER_BUCKET_SILENT_AFTER`` becomes free.

    *name* is the hash tag of the keys in Redis, which users of an access list need: ``{name}:available_buckets`` and so
    on.  Gauges and counters begin with *prefix*, by default the batch's name.  *called* names the rows to people.

    >>> Buckets("old_pipelines", count=4, loop_limit=500)

    Raises `Mistake` for a name or a count that makes no buckets.
    """

    name: str
    _: KW_ONLY
    count: int
    count_with: Mapping[str, int] = field(default_factory=dict)
    loop_limit: int | None = None
    prefix: str | None = None
    called: str = ""

    def __post_init__(self) -> None:
        """Refuse values that make no buckets."""
        if not self.name or not {"{", "}"}.isdisjoint(self.name):
            raise Mistake(f"Buckets {self.name!r}: the name is the hash tag of their keys; write it without braces")
        if self.min_count < 1:
            raise Mistake(f"Buckets of {self.name}: count has to be at least 1, not {self.min_count}")
        if self.loop_limit is not None and self.loop_limit < 1:
            raise Mistake(f"Buckets of {self.name}: loop_limit has to be at least 1, not {self.loop_limit}")

    @property
    def possible_counts(self) -> list[int]:
        """All numbers of buckets that there may be."""
        return [self.count, *self.count_with.values()]

    @property
    def min_count(self) -> int:
        """The lowest number of buckets that there may be."""
        return min(self.possible_counts)
