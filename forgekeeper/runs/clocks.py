"""The clocks of PostgreSQL, Redis and this machine, compared.

What is due is decided by PostgreSQL's clock in some batches and by Redis's in others; one that is
a day ahead deletes what should live.  A question takes time: a clock is taken to have answered in
the middle of it, and half of it is doubt, which never counts against the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from itertools import combinations
from typing import NamedTuple

import redis

from forgekeeper.connections import client
from forgekeeper.database import now
from forgekeeper.runs.blocked import Blocked
from forgekeeper.settings import Settings

NAMES = {"postgresql": "PostgreSQL's clock", "redis": "Redis's clock", "host": "this machine's clock"}


class Reading(NamedTuple):
    """What a clock said: an instant, how far it is from the monotonic clock, and how wrong that may be, in seconds."""

    said: datetime
    offset: float
    doubt: float


class Difference(NamedTuple):
    """How far *clock* is ahead of *reference*, in seconds, and how wrong that may be."""

    clock: str
    reference: str
    seconds: float
    doubt: float

    def exceeds(self, tolerance: timedelta) -> bool:
        """Say whether the clocks are further apart than that beyond doubt."""
        return abs(self.seconds) - self.doubt > tolerance.total_seconds()

    def sentence(self) -> str:
        """Say it to people."""
        way = f"{abs(self.seconds):.0f} s {'ahead of' if self.seconds > 0 else 'behind'}"
        return f"{NAMES[self.clock]} is {way} {NAMES[self.reference]}; set right the one that is wrong"


def read() -> dict[str, Reading]:
    """Read all clocks, within a moment; raise what PostgreSQL and Redis raise when they are away."""
    return {"postgresql": _read(now), "redis": _read(_of_redis), "host": _read(_of_host)}


def differences() -> list[Difference]:
    """Read all clocks, and compare each with each."""
    clocks = read()
    return [between(clocks, *pair) for pair in combinations(clocks, 2)]


def between(clocks: Mapping[str, Reading], clock: str, reference: str) -> Difference:
    """Compare two of them."""
    one, other = clocks[clock], clocks[reference]
    return Difference(clock, reference, one.offset - other.offset, one.doubt + other.doubt)


def require(settings: Settings) -> None:
    """Raise `Blocked` where PostgreSQL's and Redis's clocks are too far apart to know what is due.

    A Redis that is away has no clock to go by: whatever needs it fails of itself.
    """
    try:
        clocks = read()
    except redis.RedisError:
        return
    difference = between(clocks, "postgresql", "redis")
    if difference.exceeds(settings.clock_tolerance):
        said = f"PostgreSQL's clock says {_written(clocks['postgresql'])} and Redis's {_written(clocks['redis'])}"
        allowed = f"FORGEKEEPER_CLOCK_TOLERANCE allows {settings.clock_tolerance.total_seconds():g} s"
        raise Blocked("clocks", f"{said}, and {allowed}: set right the one that is wrong")


def _written(reading: Reading) -> str:
    return reading.said.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def _read(ask: Callable[[], datetime]) -> Reading:
    began = time.monotonic()
    said = ask()
    ended = time.monotonic()
    return Reading(said, said.timestamp() - (began + ended) / 2, (ended - began) / 2)


def _of_redis() -> datetime:
    seconds, microseconds = client.time()
    return datetime.fromtimestamp(seconds + microseconds / 1e6, UTC)


def _of_host() -> datetime:
    return datetime.fromtimestamp(time.time(), UTC)
