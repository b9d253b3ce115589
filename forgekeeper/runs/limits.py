"""How much a batch may delete, each run and each day, and how much of that is left."""

from __future__ import annotations

from typing import Literal, NamedTuple

from forgekeeper.runs.totals import RunTotal, Used
from forgekeeper.settings import Settings

Why = Literal["stopped", "held", "cancelled", "max_per_run", "max_per_day"]
MOST = 2**62
"""As much as there is."""


class Left(NamedTuple):
    """How much limits leave, and which of them is the nearest; None where nothing is limited."""

    amount: int
    why: Why | None


class Limits(NamedTuple):
    """How much runs may delete: records and bytes, each run and each day (UTC); None: as much as there is."""

    per_run: int | None = None
    per_day: int | None = None
    bytes_per_run: int | None = None
    bytes_per_day: int | None = None

    @property
    def of_bytes(self) -> bool:
        """Whether bytes are limited."""
        return self.bytes_per_run is not None or self.bytes_per_day is not None

    def records(self, used: Used) -> Left:
        """Say how many records are left, of what was released too."""
        return _nearest(
            ("max_per_run", self.per_run, used.run),
            ("max_per_run", used.released, 0),
            ("max_per_day", self.per_day, used.day),
        )

    def bytes(self, used: Used) -> Left:
        """Say how many bytes are left."""
        return _nearest(
            ("max_per_run", self.bytes_per_run, used.run_bytes), ("max_per_day", self.bytes_per_day, used.day_bytes)
        )


def room(batch: str, settings: Settings, run: int, *, released: bool) -> int | None:
    """Return how many records limits, and what was *released*, leave to the run today; None where there are none."""
    used = RunTotal.used(batch, run)
    left = Limits(*settings.limits(batch)).records(used if released else used._replace(released=None))
    return None if left.why is None else left.amount


def _nearest(*limits: tuple[Why, int | None, int]) -> Left:
    left = [Left(max(0, limit - used), why) for why, limit, used in limits if limit is not None]
    return min(left, key=lambda one: one.amount, default=Left(MOST, None))
