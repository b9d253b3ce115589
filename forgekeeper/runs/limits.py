"""How much a batch may delete, each run and each day, and how much of that is left."""

from __future__ import annotations

from typing import Generic, Literal, NamedTuple, TypeVar

from forgekeeper.runs.totals import Amount, RunTotal, Used
from forgekeeper.settings import Settings

Room = TypeVar("Room", int, Amount)
Why = Literal["stopped", "held", "cancelled", "max_per_run", "max_per_day"]
MOST = 2**62
"""As much as there is."""


class Found(NamedTuple, Generic[Room]):
    """How much room there is; where there is none, which limit is reached, and what is *held* by others."""

    room: Room
    why: Why | None
    held: Used | None = None


class Limits(NamedTuple):
    """How much runs may delete: records and bytes, each run and each day (UTC); None: as much as there is."""

    per_run: int | None = None
    per_day: int | None = None
    bytes_per_run: int | None = None
    bytes_per_day: int | None = None

    @property
    def of_records(self) -> bool:
        """Whether records are limited."""
        return self.per_run is not None or self.per_day is not None

    @property
    def of_bytes(self) -> bool:
        """Whether bytes are."""
        return self.bytes_per_run is not None or self.bytes_per_day is not None

    def records(self, used: Used) -> Found[int]:
        """Say how many records are left, of what was released too."""
        released = None if used.released is None else max(0, used.released)
        of_run = _least(_left(self.per_run, used.run), released)
        return _found(of_run, _left(self.per_day, used.day), used if used.reserved > 0 else None)

    def bytes(self, used: Used) -> Found[int]:
        """Say how many bytes are left."""
        held = used if used.reserved_bytes > 0 else None
        return _found(_left(self.bytes_per_run, used.run_bytes), _left(self.bytes_per_day, used.day_bytes), held)


UNLIMITED = Limits()


def room(batch: str, settings: Settings, run: int, *, released: bool) -> int | None:
    """Return how many records limits, and what was *released*, leave to the run today; None where there are none."""
    used = RunTotal.used(batch, run)
    found = Limits(*settings.limits(batch)).records(used if released else used._replace(released=None)).room
    return None if found == MOST else found


def _found(of_run: int | None, of_day: int | None, held: Used | None) -> Found[int]:
    room = _least(of_run, of_day)
    if room is None:
        return Found(MOST, None)
    return Found(room, "max_per_run" if of_run == room else "max_per_day", held)


def _left(limit: int | None, used: int) -> int | None:
    return None if limit is None else max(0, limit - used)


def _least(*amounts: int | None) -> int | None:
    return min((amount for amount in amounts if amount is not None), default=None)
