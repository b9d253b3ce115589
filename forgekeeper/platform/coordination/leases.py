"""Leases: the right to work on something alone, held by at most one process for each name.

There is no waiting.  A lease is a key that Redis forgets after *ttl*; its holder renews it every third of that, and
never past *at_most*, so that neither a dead holder nor one that hangs keeps it.  No step of a holder is prevented: one
that was paused for longer than *ttl* has lost the lease while it still works.  `check` says so at its next safe point,
and the data has to be safe without us until then.

Where Redis does not answer, a holder believes what it said for *ttl*, also when the lease has been broken or flushed
away in the meantime.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import uuid4

import redis
from redis.lock import Lock

from forgekeeper.platform.coordination.values import moment, raw, second, text
from forgekeeper.platform.database.sessions import engine
from metrics.threads import Vital

KEY = "forgekeeper:lease:"
"""Before the name: a string that expires, of a token, the second it was taken by Redis's clock, and the holder."""


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
    """A lease, and the thread that renews it; ask it at every safe point whether it is held."""

    def __init__(
        self,
        client: redis.Redis,
        name: str,
        holder: str,
        *,
        ttl: timedelta,
        at_most: timedelta,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(f"lease {name}")
        self._client = client
        self._what = name
        self._key = KEY + name
        self._holder, self._value = holder, ""
        self._ttl = ttl.total_seconds()
        self._milliseconds = round(self._ttl * 1_000)
        self._at_most = at_most.total_seconds()
        self._clock = clock
        # Redis counts from when it was reached, so from here on we count no longer than it does.
        self._taken = self._proved = clock()
        self._gone = False

    def take(self) -> None:
        """Take it, or raise `LeaseTaken`; one whose reply was lost is ours."""
        with engine():
            try:
                taken = self._set()
            except (redis.ConnectionError, redis.TimeoutError):
                taken = self._set() or self._client.get(self._key) == self._value.encode()
        if not taken:
            raise LeaseTaken(f"the lease {self._what} is held by another")

    def _set(self) -> bool:
        self._value = self._value or f"{uuid4().hex} {self._client.time()[0]} {self._holder}"
        return bool(self._client.set(self._key, self._value, nx=True, px=self._milliseconds))

    def release(self) -> None:
        """Give it back, if it is ours; where Redis cannot be reached it ends by itself."""
        for _ in range(2):  # one connection may have been lost
            with suppress(redis.RedisError):
                self._if_ours(Lock.LUA_RELEASE_SCRIPT)
                break

    def check(self) -> None:
        """Raise `LeaseLost` unless the lease is ours; renew it.

        Without an answer of Redis, which costs the client's time-out, the last one counts for *ttl*, and no longer.
        """
        if not self._doubt():
            self._renew()
        if doubt := self._doubt():
            raise LeaseLost(f"the lease {self._what} {doubt}")

    def work(self) -> None:
        """Renew the lease every third of its life until stopped, or until it is lost: its holder learns by asking."""
        while not self.stopped.wait(self._ttl / 3) and not self._doubt():
            self.take_turn(self._renew)
        self.stopped.set()

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
        asked = self._clock()
        try:
            renewed = self._if_ours(Lock.LUA_REACQUIRE_SCRIPT, self._milliseconds)
        except redis.RedisError:
            return  # no proof: enough of that is doubt
        if renewed:
            self._proved = asked
        else:
            self._gone = True

    def _if_ours(self, script: str, *values: int) -> bool:
        """Run a script of redis-py's locks, which changes nothing where the lease is not ours; say whether it was."""
        with engine():
            return bool(self._client.register_script(script)(keys=[self._key], args=[self._value, *values]))


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
    """Hold the lease *name* for the body, or raise `LeaseTaken` at once; give it back on every way out.

    Raises `LeaseInTransaction`, without a word to Redis, when *forbidden* says so.  *holder* is for people to read.
    """
    if forbidden is not None and forbidden():
        raise LeaseInTransaction(f"the lease {name} was asked for inside a database transaction")
    held = Lease(client, name, holder, ttl=ttl, at_most=at_most, clock=clock)
    held.take()
    try:
        held.start()
        yield held
    finally:
        held.stopped.set()
        held.release()
        if held.is_alive():
            held.join()


def leases(client: redis.Redis) -> list[Held]:
    """List the leases that are held, the one held for longest first."""
    keys = sorted({*client.scan_iter(f"{KEY}*", count=1_000)})
    if not keys:
        return []
    with client.pipeline(transaction=False) as pipe:
        pipe.mget(keys)
        for key in keys:
            pipe.pttl(key)
        values, *left = pipe.execute()
    # One that has just ended has no value, as has a key of another type.
    found = zip(keys, values, left, strict=True)
    return sorted((_read(key, value, left) for key, value, left in found if value), key=lambda one: one.since)


def _read(key: bytes, value: bytes, left: int) -> Held:
    _token, since, holder, *_ = [*value.split(b" ", 2), b"", b""]
    forever = timedelta.max if left < 0 else timedelta(milliseconds=left)
    return Held(text(key.removeprefix(KEY.encode())), text(holder), moment(second(since)), forever)


def break_lease(client: redis.Redis, name: str, *, held: Held | None = None) -> bool:
    """Free the lease, whose holder learns of it at its next safe point; return False when it has none.

    With *held*, free it only if its holder has not changed since `leases` returned that.
    """
    key = KEY.encode() + raw(name)
    if held is None:
        return bool(client.delete(key))
    value: Any = client.get(key)
    if value is None or _read(key, value, 0)[:3] != held[:3]:
        return False
    return bool(client.register_script(Lock.LUA_RELEASE_SCRIPT)(keys=[key], args=[value]))
