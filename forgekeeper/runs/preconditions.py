"""What has to be true of the world before a batch may delete anything in it: else it is blocked.

What is due is decided by PostgreSQL's clock in some batches and by Redis's in others; one that is a day ahead deletes
what should live.  A question takes time: a clock is taken to have answered in the middle of it, and half of it is
doubt, which never counts against the clock.
"""

from __future__ import annotations

import time
from datetime import timedelta
from itertools import combinations
from typing import Literal, NamedTuple, get_args

import redis

from forgekeeper.batches import BatchSpec
from forgekeeper.connections import client
from forgekeeper.database import now
from forgekeeper.database.schema import misread
from forgekeeper.installation import agreement
from forgekeeper.settings import Settings

Reason = Literal["no_store", "no_repositories", "flag_unreadable", "installation", "clocks", "schema"]
REASONS: tuple[str, ...] = get_args(Reason)
"""A closed set: labels of metrics and entries of the ledger are made of it."""
NAMES = {"postgresql": "PostgreSQL's clock", "redis": "Redis's clock", "host": "this machine's clock"}


class Blocked(Exception):
    """The batch must not go on here; the message is a sentence that says why, and what to do about it.

    It is raised before anything is changed, or between two chunks.  The run ends there without a retry: the next tick
    tries again.
    """

    def __init__(self, reason: Reason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


def require(batch: BatchSpec, settings: Settings, *, claims: bool = True) -> None:
    """Raise `Blocked` where *batch*, or a child of it, must not work; asked once, before it begins.

    A run claims a Redis that is nobody's; a preview does not, and raises `redis.RedisError` where Redis is away.
    """
    _require_clocks(settings)
    try:
        agreement.require(batch.deletes_from, settings, claims=claims)
    except agreement.Disagreement as disagreement:
        raise Blocked("installation", str(disagreement)) from None
    for sentence in (*misread(batch.tables), *batch.misreadings()):
        raise Blocked("schema", sentence)


def _require_clocks(settings: Settings) -> None:
    """Raise `Blocked` where PostgreSQL's and Redis's clocks are too far apart to know what is due.

    A Redis that is away has no clock to go by: whatever needs it fails of itself.
    """
    try:
        (found,) = differences("postgresql", "redis")
    except redis.RedisError:
        return
    if found.exceeds(settings.clock_tolerance):
        allowed = f"FORGEKEEPER_CLOCK_TOLERANCE allows {settings.clock_tolerance.total_seconds():g} s"
        raise Blocked("clocks", f"{found.sentence()} ({allowed})")


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


def differences(*clocks: str) -> list[Difference]:
    """Read these clocks, or all, within a moment, and compare each with each; raises what servers raise."""
    read = {name: _read(name) for name in clocks or NAMES}
    return [
        Difference(one, other, read[one][0] - read[other][0], read[one][1] + read[other][1])
        for one, other in combinations(read, 2)
    ]


def _read(clock: str) -> tuple[float, float]:
    """Return how far the clock is from the monotonic one, and how wrong that may be, in seconds."""
    began = time.monotonic()
    if clock == "postgresql":
        said = now().timestamp()
    elif clock == "redis":
        seconds, microseconds = client.time()
        said = seconds + microseconds / 1e6
    else:
        said = time.time()
    ended = time.monotonic()
    return said - (began + ended) / 2, (ended - began) / 2
