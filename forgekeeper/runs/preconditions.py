"""What has to be true of the world before a batch may delete anything in it: else it is blocked.

What is due is decided by PostgreSQL's clock in some batches and by Redis's in others; one that is a day ahead deletes
what should live.  A question takes time: a clock is taken to have answered in the middle of it, and half of it is
doubt, which never counts against the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import combinations
from typing import Literal, NamedTuple, get_args

import redis

from forgekeeper.batches import BatchSpec
from forgekeeper.connections import client
from forgekeeper.database import now
from forgekeeper.database.schema import misread
from forgekeeper.installation import Disagreement, Installation, agree, conflict, objection, owner
from forgekeeper.settings import Place, Settings
from forgekeeper.storage import sentinel
from forgekeeper.storage.outbox import DeletedObject

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
        _require_installation(batch.deletes_from, settings, claims=claims)
    except Disagreement as disagreement:
        raise Blocked("installation", str(disagreement)) from None
    for sentence in (*misread(batch.tables), *batch.misreadings()):
        raise Blocked("schema", sentence)


def _require_installation(deletes_from: Place | None, settings: Settings, *, claims: bool) -> None:
    """Raise `Disagreement` unless database, Redis and the places that are deleted from are one installation's.

    A database that was copied or moved is not, until a person says which it is.  Redis and places that do not answer
    are left out: the batch fails if it needs them.  Where nothing *claims*, nothing is written, and a Redis that is
    away raises.
    """
    if said := objection():
        raise Disagreement(said)
    ours = _claimed() if claims else _known()
    if ours is None:
        return  # a worker will make one
    root = settings.repositories_root
    if deletes_from == "repositories" and root is not None:
        _require_place(lambda: sentinel.Folder(root), ours)
    for location, url in settings.object_stores.items():
        if deletes_from == "stores" or (deletes_from == "artifacts" and location == DeletedObject.location):
            _require_place(partial(sentinel.Store, location, url.get_secret_value()), ours)


def _claimed() -> str:
    try:
        return agree()
    except redis.RedisError:
        return Installation.ensure()


def _known() -> str | None:
    ours, theirs = Installation.known(), owner(client)
    if ours is not None and theirs not in (None, ours):
        raise Disagreement(conflict(ours, theirs))
    return ours


def _require_place(opened: Callable[[], sentinel.Place], ours: str) -> None:
    with suppress(sentinel.Unreadable):
        at = opened()
        found = at.sentinel()
        if found is not None and (said := sentinel.objection(at, found, ours)):
            raise Disagreement(said)


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
