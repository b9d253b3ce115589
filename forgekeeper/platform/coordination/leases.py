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
from functools import cached_property, partial
from typing import Any, NamedTuple
from uuid import uuid4

import redis

from forgekeeper.platform.connections import add_scripts, run_script
from forgekeeper.platform.coordination.redis_values import decode_text, encode_text, parse_second, to_datetime
from forgekeeper.platform.database.sessions import engine_step
from metrics.threads import CriticalThread

LEASE_KEY_PREFIX = "forgekeeper:lease:"
"""Prefix of keys.  The value, which expires, has a token, the second of the claim by Redis's clock, and the holder."""


add_scripts("forgekeeper.platform.coordination")


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
    """A lease of a group; call `check` at every safe point."""

    def __init__(self, group: LeaseGroup, name: str) -> None:
        self.key = LEASE_KEY_PREFIX + name
        self.value = f"{uuid4().hex} {group.second} {group.holder}"
        self._name, self._group = name, group
        # Redis starts the ttl later, when the command arrives: so we never count longer than Redis.
        self._taken_at = self._confirmed_at = group.clock()
        self._is_lost = False

    def check(self) -> None:
        """Renew the lease; raise `LeaseLost` unless it is ours.

        If Redis does not answer within the client's timeout, its last answer counts for *ttl*.
        """
        if self.is_ours:
            self._group.renew([self])
        if doubt := self._why_lost():
            raise LeaseLost(f"the lease {self._name} {doubt}")

    @property
    def is_ours(self) -> bool:
        """Whether the last answer of Redis still counts."""
        return self._why_lost() is None

    def note_answer(self, *, is_ours: bool, asked_at: float) -> None:
        """Note Redis's answer to a request that was sent at *asked_at*."""
        if is_ours:
            self._confirmed_at = asked_at
        else:
            self._is_lost = True

    def _why_lost(self) -> str | None:
        now, ttl, most = self._group.clock(), self._group.ttl_seconds, self._group.max_seconds
        if self._is_lost:
            return "was deleted, or another process holds it"
        if now - self._confirmed_at >= ttl:
            return f"could not be renewed for {ttl:g} s"
        if now - self._taken_at >= most:
            return f"was held for the maximum of {most:g} s"
        return None


class LeaseGroup:
    """Leases with one *holder*: each step is one request for any number of them."""

    def __init__(
        self, client: redis.Redis, holder: str, *, ttl: timedelta, max_duration: timedelta, clock: Callable[[], float]
    ) -> None:
        self.holder = holder
        self.clock = clock
        self.ttl_seconds, self.max_seconds = ttl.total_seconds(), max_duration.total_seconds()
        self._client = client

    @cached_property
    def second(self) -> int:
        """The second of the claim by Redis's clock."""
        with engine_step():
            return int(_ask_twice(self._client.time)[0])

    def take(self, names: Sequence[str]) -> dict[str, Lease]:
        """Take the leases that are free; return them by name."""
        leases = {name: Lease(self, name) for name in names}
        taken = _ask_twice(partial(self._run, "lease_take", [*leases.values()], self._milliseconds))
        return {name: lease for (name, lease), is_ours in zip(leases.items(), taken, strict=True) if is_ours}

    def renew(self, leases: Sequence[Lease]) -> None:
        """Renew leases if Redis answers; `Lease.check` raises if one is lost."""
        asked_at = self.clock()
        # If Redis does not answer, the time since the last confirmation counts.
        with suppress(redis.RedisError):
            renewed = self._run("lease_renew", leases, self._milliseconds)
            for lease, is_ours in zip(leases, renewed, strict=True):
                lease.note_answer(is_ours=bool(is_ours), asked_at=asked_at)

    def release(self, leases: Sequence[Lease]) -> None:
        """Release the leases that are ours; if Redis is unreachable, they expire."""
        for _ in range(2):  # one connection may have been lost
            with suppress(redis.RedisError):
                self._run("lease_release", leases)
                break

    @property
    def _milliseconds(self) -> int:
        return round(self.ttl_seconds * 1_000)

    def _run(self, script: str, leases: Sequence[Lease], *values: int) -> Any:
        keys, args = [lease.key for lease in leases], [*values, *(lease.value for lease in leases)]
        return run_script(self._client, script, keys=keys, args=args)


def _ask_twice(ask: Callable[[], Any]) -> Any:
    """Return the answer of *ask*; if the reply was lost, ask again."""
    try:
        return ask()
    except (redis.ConnectionError, redis.TimeoutError):
        return ask()


class _Renewal(CriticalThread):
    """The thread that renews leases every third of their *ttl*, until stopped or until all are lost."""

    def __init__(self, group: LeaseGroup, leases: Mapping[str, Lease]) -> None:
        super().__init__(f"leases {', '.join(leases)}")
        self._group, self._leases = group, leases

    def run_until_stopped(self) -> None:
        """Renew the leases that are not lost; `Lease.check` tells their holder."""
        while not self.stopped.wait(self._group.ttl_seconds / 3):
            ours = [one for one in self._leases.values() if one.is_ours]
            if not ours:
                break
            self.take_turn(partial(self._group.renew, ours))
        self.stopped.set()


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
    group = LeaseGroup(client, holder, ttl=ttl, max_duration=max_duration, clock=clock)
    held: dict[str, Lease] = {}
    renewal: _Renewal | None = None
    try:
        held = group.take(names)
        if held:
            renewal = _Renewal(group, held)
            renewal.start()
        yield held
    finally:
        if renewal is not None:
            renewal.stopped.set()
        if held:
            group.release([*held.values()])
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
    return bool(run_script(client, "lease_release", keys=[key], args=[value]))
