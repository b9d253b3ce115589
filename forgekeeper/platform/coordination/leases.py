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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import cache
from typing import Any, NamedTuple, NotRequired, TypedDict, Unpack
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


class Lease:
    """A lease; call `check` at every safe point."""

    def __init__(
        self,
        client: redis.Redis,
        name: str,
        holder: str,
        *,
        ttl: timedelta,
        max_duration: timedelta,
        clock: Callable[[], float],
        read_second: Callable[[], int],
    ) -> None:
        self._client = client
        self._name = name
        self._key = LEASE_KEY_PREFIX + name
        self._holder, self._value = holder, ""
        self._ttl = ttl.total_seconds()
        self._milliseconds = round(self._ttl * 1_000)
        self._max_duration = max_duration.total_seconds()
        self._clock, self._read_second = clock, read_second
        # Redis starts the ttl later, when the command arrives: so we never count longer than Redis.
        self._taken_at = self._confirmed_at = clock()
        self._is_lost = False

    def acquire(self) -> bool:
        """Take the lease if it is free, and return whether it was; if the reply was lost, ask for the outcome."""
        with engine_step():
            try:
                return self._set_key()
            except (redis.ConnectionError, redis.TimeoutError):
                return self._set_key() or self._client.get(self._key) == self._value.encode()

    def _set_key(self) -> bool:
        self._value = self._value or f"{uuid4().hex} {self._read_second()} {self._holder}"
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
        if self.is_ours:
            self.renew()
        if doubt := self._why_lost():
            raise LeaseLost(f"the lease {self._name} {doubt}")

    @property
    def is_ours(self) -> bool:
        """Whether the last answer of Redis still counts."""
        return self._why_lost() is None

    def renew(self) -> None:
        """Renew the lease if Redis answers; `check` raises if it is lost."""
        asked = self._clock()
        try:
            renewed = self._run_if_ours(Lock.LUA_REACQUIRE_SCRIPT, self._milliseconds)
        except redis.RedisError:
            return  # unconfirmed: `_why_lost` counts the time since the last confirmation
        if renewed:
            self._confirmed_at = asked
        else:
            self._is_lost = True

    def _why_lost(self) -> str | None:
        now = self._clock()
        if self._is_lost:
            return "was deleted, or another process holds it"
        if now - self._confirmed_at >= self._ttl:
            return f"could not be renewed for {self._ttl:g} s"
        if now - self._taken_at >= self._max_duration:
            return f"was held for the maximum of {self._max_duration:g} s"
        return None

    def _run_if_ours(self, script: str, *values: int) -> bool:
        """Run a script of redis-py's locks if the lease is ours; return whether it is."""
        with engine_step():
            return bool(self._client.register_script(script)(keys=[self._key], args=[self._value, *values]))


class _Renewal(CriticalThread):
    """The thread that renews leases every third of their *ttl*, until stopped or until all are lost."""

    def __init__(self, leases: Mapping[str, Lease], ttl: timedelta) -> None:
        super().__init__(f"leases {', '.join(leases)}")
        self._leases, self._pause_seconds = leases, ttl.total_seconds() / 3

    def run_until_stopped(self) -> None:
        """Renew the leases that are not lost; `Lease.check` tells their holder."""
        while not self.stopped.wait(self._pause_seconds):
            ours = [one for one in self._leases.values() if one.is_ours]
            if not ours:
                break
            for one in ours:
                self.take_turn(one.renew)
        self.stopped.set()


class LeaseOptions(TypedDict):
    """Options of leases; `hold_leases` explains them."""

    ttl: timedelta
    holder: str
    max_duration: NotRequired[timedelta]
    is_forbidden: NotRequired[Callable[[], bool]]
    clock: NotRequired[Callable[[], float]]


@contextmanager
def hold_lease(client: redis.Redis, name: str, **options: Unpack[LeaseOptions]) -> Iterator[Lease]:
    """Hold the lease *name* during the body, or raise `LeaseTaken` at once; see `hold_leases`."""
    with hold_leases(client, [name], **options) as held:
        if name not in held:
            raise LeaseTaken(f"another process holds the lease {name}")
        yield held[name]


@contextmanager
def hold_leases(
    client: redis.Redis,
    names: Sequence[str],
    *,
    ttl: timedelta,
    holder: str,
    max_duration: timedelta = timedelta(minutes=10),
    is_forbidden: Callable[[], bool] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Mapping[str, Lease]]:
    """Hold the free leases among *names* during the body, and always release them; yield them by name.

    Raises `LeaseInTransaction`, before Redis is contacted, if *is_forbidden* returns True, and `redis.RedisError` if
    Redis does not answer.  *holder* is for display only.
    """
    if is_forbidden is not None and is_forbidden():
        raise LeaseInTransaction(f"the lease {names[0]} cannot be taken inside a database transaction")
    read_second = cache(lambda: int(client.time()[0]))
    options: dict[str, Any] = {"ttl": ttl, "max_duration": max_duration, "clock": clock, "read_second": read_second}
    held: dict[str, Lease] = {}
    renewal: _Renewal | None = None
    try:
        for name in names:
            lease = Lease(client, name, holder, **options)
            if lease.acquire():
                held[name] = lease
        if held:
            renewal = _Renewal(held, ttl)
            renewal.start()
        yield held
    finally:
        if renewal is not None:
            renewal.stopped.set()
        for lease in held.values():
            lease.release()
        if renewal is not None and renewal.is_alive():
            renewal.join()


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
