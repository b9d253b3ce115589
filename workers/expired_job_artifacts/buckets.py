"""Buckets: the shares of the artifact batch, and its capacity.

Each bucket below the maximum is either available or occupied by one owner, known by the token of its claim.  Nothing
waits.  An owner without a heartbeat for ten minutes loses its bucket to the next tidying; if it still works, `renew`
says so at its next safe point, and row locks keep the rows safe until then.

Every script is atomic, goes by Redis's clock, and is idempotent.  It is repeated when a reply was lost: an unknown
claim would keep its bucket for ten minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import Any, NamedTuple
from uuid import uuid4

import redis

from forgekeeper.coordination import key_types as redis_types
from forgekeeper.coordination import scripts
from forgekeeper.coordination.scripts import call
from forgekeeper.coordination.values import is_whole, moment, text

scripts.add("workers.expired_job_artifacts")

AVAILABLE = "{bulk_delete_expired_job_artifacts}:available_buckets"
OCCUPIED = "{bulk_delete_expired_job_artifacts}:occupied_buckets"
OWNERS = "{bulk_delete_expired_job_artifacts}:bucket_owners"
STATE = "{bulk_delete_expired_job_artifacts}:bucket_state"
redis_types.declare({AVAILABLE: "set", OCCUPIED: "zset", OWNERS: "hash", STATE: "hash"})


@dataclass(frozen=True)
class Bucket:
    """A claim: the rows whose key modulo *modulus* is *number*, whatever the maximum becomes meanwhile."""

    number: int
    modulus: int
    token: str


@dataclass(frozen=True)
class Counts:
    """The buckets as a tidying found them, before it changed anything; silent owners count as occupying."""

    max_buckets: int
    available_count: int
    occupied_count: int
    stale_count: int
    missing_count: int


class Hold(Enum):
    """What an owner still has of its bucket."""

    OURS = "ours"
    SCALED_DOWN = "scaled_down"  # ours alone, but to be released soon
    LOST = "lost"  # another's, available, or flushed away


class Held(NamedTuple):
    """An occupied bucket, for people; without *token* it was not claimed here."""

    number: int
    since: datetime
    token: str | None


def tidy(client: redis.Redis, max_buckets: int, *, silent_for: timedelta = timedelta(minutes=10)) -> Counts:
    """Make each bucket below *max_buckets* exist exactly once; return what was found.

    Buckets whose owner has been silent for *silent_for* or longer become available,
    missing ones are added, and available ones that no longer exist are dropped.  One that
    is occupied stays with its owner until that releases it.  What is no bucket is removed.
    """
    found = _run(client, "bucket_tidy", [AVAILABLE, OCCUPIED, OWNERS, STATE], max_buckets, silent_for.total_seconds())
    return Counts(max_buckets, *found)


def claim(client: redis.Redis, max_buckets: int) -> Bucket | None:
    """Take an available bucket below *max_buckets*; return None when there is none."""
    token = uuid4().hex
    number = _run(client, "bucket_claim", [AVAILABLE, OCCUPIED, OWNERS, STATE], max_buckets, token)
    return None if number is None else Bucket(number, max_buckets, token)


@contextmanager
def claimed(client: redis.Redis, max_buckets: int) -> Iterator[Bucket | None]:
    """Hold an available bucket below *max_buckets*, None where there is none; give it back on every way out."""
    bucket = claim(client, max_buckets) if max_buckets else None
    try:
        yield bucket
    finally:
        if bucket is not None:
            release(client, bucket)


def renew(client: redis.Redis, bucket: Bucket) -> Hold:
    """Record a heartbeat; return what is left of the bucket.

    The maximum of the last tidying says whether it was scaled down.
    """
    return Hold(_run(client, "bucket_renew", [OCCUPIED, OWNERS, STATE], bucket.number, bucket.token).decode())


def release(client: redis.Redis, bucket: Bucket) -> bool:
    """Give the bucket back; return False when it was not ours any more, or was given back already."""
    return bool(_run(client, "bucket_release", [AVAILABLE, OCCUPIED, OWNERS, STATE], bucket.number, bucket.token))


def available(client: redis.Redis) -> list[int]:
    """List the buckets that a claim could have now."""
    return sorted(int(member) for member in client.smembers(AVAILABLE) if is_whole(member))


def held(client: redis.Redis) -> list[Held]:
    """List the occupied buckets, the one silent longest first; *since* is its owner's last heartbeat."""
    with client.pipeline() as pipe:
        pipe.zrange(OCCUPIED, 0, -1, withscores=True)
        pipe.hgetall(OWNERS)
        occupied, owners = pipe.execute()
    return [
        Held(int(member), moment(since), text(owners[member]) if member in owners else None)
        for member, since in occupied
        if is_whole(member)
    ]


def _run(client: redis.Redis, script: str, keys: list[str], *args: str | float) -> Any:
    try:
        return call(client, script, keys=keys, args=list(args))
    except (redis.ConnectionError, redis.TimeoutError):
        return call(client, script, keys=keys, args=list(args))
