"""Leases: the right to work on something alone, held by at most one process for each name.

There is no waiting.  A lease lives for *ttl* and is renewed in the background every third of it, so that the lease of a
dead holder is free after *ttl*; it is never renewed past *at_most*, so that a holder that hangs loses it within
*at_most* and *ttl*.  No step of a holder is prevented: one that was paused for longer than *ttl* has lost the lease
while it still works.  `check` says so at its next safe point, and the data has to be safe without us until then.

Redis's clock alone says what has expired; set back, it makes a dead holder's lease last for
*at_most* from when another asks for it.  Where Redis does not answer, a holder believes what it said for *ttl*, also
when the lease has been broken or flushed away in the meantime.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from threading import Event
from typing import Any, NamedTuple
from uuid import uuid4

import redis

from forgekeeper.coordination import key_types as redis_types
from forgekeeper.coordination.scripts import call
from forgekeeper.coordination.values import moment, raw, text
from metrics.threads import Vital

UNTIL = "forgekeeper:{leases}:until"
SINCE = "forgekeeper:{leases}:since"
OWNERS = "forgekeeper:{leases}:owners"
redis_types.declare({UNTIL: "zset", SINCE: "zset", OWNERS: "hash"})


class LeaseTaken(Exception):
    """Another holds the lease, and is doing the work."""


class LeaseLost(Exception):
    """The lease is not ours any more, or cannot be proved to be; another may be at work."""


class LeaseInTransaction(Exception):
    """A lease was asked for inside a database transaction: it would be given back before the commit."""


class Held(NamedTuple):
    """A lease that somebody holds, for people; *left* is what it has if it is not renewed."""

    name: str
    holder: str
    since: datetime
    left: timedelta


class Lease(Vital):
    """A lease that was taken, and the thread that renews it; ask it at every safe point whether it is held."""

    def __init__(
        self,
        client: redis.Redis,
        name: str,
        owner: str,
        *,
        ttl: timedelta,
        at_most: timedelta,
        taken: float,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(f"lease {name}")
        self._client = client
        self._what = name
        self._owner = owner
        self._ttl = ttl.total_seconds()
        self._at_most = at_most.total_seconds()
        self._taken = self._proved = taken
        self._clock = clock
        self._gone = False

    def check(self) -> None:
        """Raise `LeaseLost` unless the lease is ours; renew it.

        Redis is asked.  Without an answer, which costs the client's time-out, the last one
        counts for *ttl*, and no longer.
        """
        if not self._doubt():
            self._renew()
        if doubt := self._doubt():
            raise LeaseLost(f"the lease {self._what} {doubt}")

    def work(self) -> None:
        """Renew the lease until stopped, or until it is lost: then its holder learns of it by asking."""
        while not self.take_turn(lambda: self.keep(self.stopped)):
            pass
        self.stopped.set()

    def keep(self, done: Event) -> None:
        """Renew the lease every third of its life, until *done* or lost."""
        while not done.wait(self._ttl / 3) and not self._doubt():
            self._renew()

    def _doubt(self) -> str | None:
        now = self._clock()
        if self._gone:
            return "is gone, or another's"
        if now - self._proved >= self._ttl:
            return f"could not be renewed for {self._ttl:g} s"
        if now - self._taken >= self._at_most:
            return f"was held for {self._at_most:g} s, the most there is"
        return None

    def _renew(self) -> None:
        # Redis counts from when it was reached, so from here on we count no longer than it does.
        asked = self._clock()
        try:
            renewed = call(self._client, "lease_renew", keys=[UNTIL, OWNERS], args=[self._what, self._owner, self._ttl])
        except redis.RedisError:
            return  # no proof: enough of that is doubt
        if renewed:
            self._proved = asked
        else:
            self._gone = True


@contextmanager
def lease(
    client: redis.Redis,
    name: str,
    *,
    ttl: timedelta,
    at_most: timedelta = timedelta(minutes=10),
    holder: str,
    forbidden: Callable[[], bool] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Lease]:
    """Hold the lease *name* for the body, or raise `LeaseTaken` at once.

    It is given back on every way out; where Redis cannot be reached it ends after *ttl*,
    as does one whose reply was lost.  Raises `LeaseInTransaction`, without a word
    to Redis, when *forbidden* says that this is no place for a lease.  *holder* is for
    people to read.
    """
    if forbidden is not None and forbidden():
        raise LeaseInTransaction(f"the lease {name} was asked for inside a database transaction")
    owner = f"{uuid4().hex} {holder}"
    taken = clock()
    longest = max(ttl, at_most).total_seconds()
    if not _run(client, "lease_acquire", name, owner, ttl.total_seconds(), longest):
        raise LeaseTaken(f"the lease {name} is held by another")
    held = Lease(client, name, owner, ttl=ttl, at_most=at_most, taken=taken, clock=clock)
    try:
        held.start()
        yield held
    finally:
        held.stopped.set()
        # What the body raised matters more, and a lease that is not given back ends by itself.
        with suppress(redis.RedisError):
            _run(client, "lease_release", name, owner)
        if held.is_alive():
            held.join()


def leases(client: redis.Redis) -> list[Held]:
    """List the leases that are held, the one held for longest first."""
    with client.pipeline() as pipe:
        pipe.time()
        pipe.zrange(UNTIL, 0, -1, withscores=True)
        pipe.zrange(SINCE, 0, -1, withscores=True)
        pipe.hgetall(OWNERS)
        (seconds, microseconds), until, since, owners = pipe.execute()
    instant = moment(seconds + microseconds / 1e6)
    left = {name: moment(score) - instant for name, score in until}
    return [
        Held(text(name), text(owners.get(name, b"")).partition(" ")[2], moment(score), left[name])
        for name, score in since
        if left.get(name, timedelta()) > timedelta()
    ]


def break_lease(client: redis.Redis, name: str) -> bool:
    """Free the lease, whatever holder it has; return False when it has none.

    Its holder is not stopped: it learns of it at its next safe point.
    """
    return bool(call(client, "lease_break", keys=[UNTIL, SINCE, OWNERS], args=[raw(name)]))


def _run(client: redis.Redis, script: str, *args: str | float) -> Any:
    try:
        return call(client, script, keys=[UNTIL, SINCE, OWNERS], args=list(args))
    except (redis.ConnectionError, redis.TimeoutError):
        return call(client, script, keys=[UNTIL, SINCE, OWNERS], args=list(args))
