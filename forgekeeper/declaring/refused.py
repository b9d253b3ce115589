"""What a document itself keeps of what was refused or given up: a kind of quarantine without a second copy of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from forgekeeper.settings import Settings


class Entry(NamedTuple):
    """One of them; without *retry_at* it waits for a person."""

    key: str
    error: str
    failures: int
    since: datetime | None
    retry_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class Refused:
    """How a kind is counted, listed oldest first, tried again and discarded; None stands for all of them.

    *record* names what the gauge counts, *redis* says that it lies in Redis.  Both acts return how many there were.
    """

    kind: str
    record: str
    count: Callable[[], int]
    entries: Callable[[Settings, int], Iterable[Entry]]
    retry: Callable[[Sequence[str] | None], int]
    discard: Callable[[Sequence[str] | None], int]
    redis: bool = False


def numbers(keys: Sequence[str] | None) -> list[int] | None:
    """Return the keys as the ids that they are; None for all."""
    return None if keys is None else [int(key) for key in keys if key.isdecimal()]
