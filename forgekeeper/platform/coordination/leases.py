"""Leases: locks in Redis that expire, held by at most one process for each name.

Nobody waits for a lease.  A lease is a key that Redis expires after *ttl*.  The holder renews it every third of *ttl*,
and never past *at_most*, so neither a dead holder nor a hanging holder keeps it.  A lease prevents no step: a holder
that was suspended for longer than *ttl* has lost the lease and still works.  `check` raises at its next safe point;
until then the data must be safe without the lease.

If Redis does not answer, a holder trusts the last answer for *ttl*, even if the lease was broken or flushed in the
meantime.
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

from forgekeeper.platform.coordination.redis_values import decode_text, encode_text, parse_second, to_datetime
from forgekeeper.platform.database.sessions import engine_step
from metrics.threads import CriticalThread

LEASE_KEY_PREFIX = "forgekeeper:lease:"
"""Prefix of keys.  The value, which expires, has a token, the second of the claim by Redis's clock, and the holder."""


class LeaseTaken(Exception):
    """Another process holds the lease, and does the work."""


class LeaseLost(Exception):
    """The lease is lost, or cannot be confirmed; another process may be at work."""


class LeaseInTransaction(Exception):
    """A lease was requested inside a transaction: it would be released before the commit."""


class HeldLease(NamedTuple):
    """A held lease, for display; *left* is the time until it expires unless it is renewed."""

    name: str
    holder: str
    since: datetime
    left: timedelta


class Lease(CriticalThread):
    """A lease, and the thread that renews it; call `check` at every safe point."""

    def __init__(
        self,
        client: redis.Redis,
        name: str,
        holder: str,
        *,
        ttl: timedelta,
        max_duration: timedelta,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(f"lease {name}")
        self._client = client
        self._lease_name = name
        self._key = LEASE_KEY_PREFIX + name
        self._holder, self._value = holder, ""
        self._ttl = ttl.total_seconds()
        self._milliseconds = round(self._ttl * 1_000)
        self._max_duration = max_duration.total_seconds()
        self._clock = clock
        # Redis starts the ttl later, when the command arrives: so we never count longer than Redis.
        self._taken_at = self._confirmed_at = clock()
        self._is_lost = False

    def acquire(self) -> None:
        """Take the lease, or raise `LeaseTaken`; if the reply was lost, ask for the outcome."""
        with engine_step():
            try:
                taken = self._set_key()
            except (redis.ConnectionError, redis.TimeoutError):
                taken = self._set_key() or self._client.get(self._key) == self._value.encode()
        if not taken:
            raise LeaseTaken(f"another process holds the lease {self._lease_name}")

    def _set_key(self) -> bool:
        self._value = self._value or f"{uuid4().hex} {self._client.time()[0]} {self._holder}"
        return bool(self._client.set(self._key, self._value, nx=True, px=self._milliseconds))

    def release(self) -> None:
        """Release the lease if it is ours; if Redis is unreachable, the lease expires."""
        for _ in range(2):  # one connection may have been lost
            with suppress(redis.RedisError):
                self._run_if_ours(Lock.LUA_RELEASE_SCRIPT)
                break

    def check(self) -> None:
        """Renew the lease; raise `LeaseLost` unless it is ours.

        If Redis does not answer within the client's timeout, its last answer counts for *ttl*.
        """
        if not self._why_lost():
            self._renew()
        if doubt := self._why_lost():
            raise LeaseLost(f"the lease {self._lease_name} {doubt}")

    def run_until_stopped(self) -> None:
        """Renew the lease every third of its ttl until stopped or lost; `check` tells the holder."""
        while not self.stopped.wait(self._ttl / 3) and not self._why_lost():
            self.take_turn(self._renew)
        self.stopped.set()

    def _why_lost(self) -> str | None:
        now = self._clock()
        if self._is_lost:
            return "was deleted, or another process holds it"
        if now - self._confirmed_at >= self._ttl:
            return f"could not be renewed for {self._ttl:g} s"
        if now - self._taken_at >= self._max_duration:
            return f"was held for the maximum of {self._max_duration:g} s"
        return None

    def _renew(self) -> None:
        asked = self._clock()
        try:
            renewed = self._run_if_ours(Lock.LUA_REACQUIRE_SCRIPT, self._milliseconds)
        except redis.RedisError:
            return  # unconfirmed: `_why_lost` counts the time since the last confirmation
        if renewed:
            self._confirmed_at = asked
        else:
            self._is_lost = True

    def _run_if_ours(self, script: str, *values: int) -> bool:
        """Run a script of redis-py's locks if the lease is ours; return whether it is."""
        with engine_step():
            return bool(self._client.register_script(script)(keys=[self._key], args=[self._value, *values]))


@contextmanager
def hold_lease(
    client: redis.Redis,
    name: str,
    *,
    ttl: timedelta,
    max_duration: timedelta = timedelta(minutes=10),
    holder: str,
    is_forbidden: Callable[[], bool] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Lease]:
    """Hold the lease *name* during the body, or raise `LeaseTaken` at once; always release it.

    Raises `LeaseInTransaction`, before Redis is contacted, if *is_forbidden* returns True.  *holder* is for display
    only.
    """
    if is_forbidden is not None and is_forbidden():
        raise LeaseInTransaction(f"the lease {name} cannot be taken inside a database transaction")
    held = Lease(client, name, holder, ttl=ttl, max_duration=max_duration, clock=clock)
    held.acquire()
    try:
        held.start()
        yield held
    finally:
        held.stopped.set()
        held.release()
        if held.is_alive():
            held.join()


def list_leases(client: redis.Redis) -> list[HeldLease]:
    """List the held leases, the oldest first."""
    keys = sorted({*client.scan_iter(f"{LEASE_KEY_PREFIX}*", count=1_000)})
    if not keys:
        return []
    with client.pipeline(transaction=False) as pipe:
        pipe.mget(keys)
        for key in keys:
            pipe.pttl(key)
        values, *left = pipe.execute()
    # A lease that has just expired has no value, and neither has a key of another type.
    found = zip(keys, values, left, strict=True)
    return sorted((_parse_lease(key, value, left) for key, value, left in found if value), key=lambda one: one.since)


def _parse_lease(key: bytes, value: bytes, left: int) -> HeldLease:
    _token, since, holder, *_ = [*value.split(b" ", 2), b"", b""]
    forever = timedelta.max if left < 0 else timedelta(milliseconds=left)
    return HeldLease(
        decode_text(key.removeprefix(LEASE_KEY_PREFIX.encode())),
        decode_text(holder),
        to_datetime(parse_second(since)),
        forever,
    )


def break_lease(client: redis.Redis, name: str, *, held: HeldLease | None = None) -> bool:
    """Delete a lease, so its holder stops at the next safe point; return False if it is free.

    With *held*, delete it only if its holder has not changed since `leases` returned *held*.
    """
    key = LEASE_KEY_PREFIX.encode() + encode_text(name)
    if held is None:
        return bool(client.delete(key))
    value: Any = client.get(key)
    if value is None or _parse_lease(key, value, 0)[:3] != held[:3]:
        return False
    return bool(client.register_script(Lock.LUA_RELEASE_SCRIPT)(keys=[key], args=[value]))
