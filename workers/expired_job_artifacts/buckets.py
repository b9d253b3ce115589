"""Buckets: the shares of the artifact batch, and its capacity.

Each bucket below the maximum is either available or occupied by one owner, known by the token of its claim.  Nothing
waits.  A child that is started again, as after the death of its worker, takes the bucket that it had: otherwise as many
deaths as there are buckets would stop all deletion.  An owner without a heartbeat for ten minutes loses its bucket to
the next tidying.  If an earlier owner still works, `renew` says so at its next safe point, and row locks keep the rows
safe until then.

Every script is atomic and goes by Redis's clock.  A claim whose reply is lost keeps its bucket until its child is
started again, for ten minutes at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple
from uuid import uuid4

import redis

from forgekeeper.platform.connections import add_scripts, call
from forgekeeper.platform.coordination.values import DECLARED, is_whole, moment, text

add_scripts("workers.expired_job_artifacts")

AVAILABLE = "{bulk_delete_expired_job_artifacts}:available_buckets"
OCCUPIED = "{bulk_delete_expired_job_artifacts}:occupied_buckets"
OWNERS = "{bulk_delete_expired_job_artifacts}:bucket_owners"
STATE = "{bulk_delete_expired_job_artifacts}:bucket_state"
KEYS = [AVAILABLE, OCCUPIED, OWNERS, STATE]
"""Numbers; numbers by the second of the last heartbeat; tokens by number; `max_buckets`, as the last tidying had it,
and `last_claimed`.
"""
DECLARED.update({AVAILABLE: "set", OCCUPIED: "zset", OWNERS: "hash", STATE: "hash"})

Lost = Literal["scale_down", "bucket_lost"]
"""Why an owner has to end: its bucket exists no longer, or is not its own any more."""


@dataclass(frozen=True)
class Bucket:
    """A claim: the rows whose key modulo *modulus* is *number*, whatever the maximum becomes meanwhile."""

    number: int
    modulus: int
    token: str


class Held(NamedTuple):
    """An occupied bucket, for people; without *token* it was not claimed here."""

    number: int
    since: datetime
    token: str | None


def tidy(client: redis.Redis, max_buckets: int, *, silent_for: timedelta = timedelta(minutes=10)) -> dict[str, int]:
    """Make each bucket below *max_buckets* exist exactly once; return what was found, by the fields of the result.

    Buckets whose owner has been silent for *silent_for* or longer become available, missing ones are added, available
    ones that no longer exist are dropped; an occupied one stays with its owner.  Silent owners count as occupying.
    """
    found = _repeatable(client, "bucket_tidy", max_buckets, silent_for.total_seconds())
    counted = ("available_count", "occupied_count", "stale_count", "missing_count")
    return {"max_buckets": max_buckets, **dict(zip(counted, found, strict=True))}


def claim(client: redis.Redis, max_buckets: int, *, child: str | None = None) -> Bucket | None:
    """Take a bucket below *max_buckets*: if an earlier start of the *child* has one, its bucket, else an available one.

    Return None if there is neither.  An earlier start that still works learns from `renew` that its bucket is lost.
    """
    token = f"{child} {uuid4().hex}" if child else uuid4().hex
    number = call(client, "bucket_claim", keys=KEYS, args=[max_buckets, token])
    return None if number is None else Bucket(number, max_buckets, token)


@contextmanager
def claimed(client: redis.Redis, max_buckets: int, *, child: str | None = None) -> Iterator[Bucket | None]:
    """Hold the bucket that `claim` returns; give it back on every way out."""
    bucket = claim(client, max_buckets, child=child) if max_buckets else None
    try:
        yield bucket
    finally:
        if bucket is not None:
            release(client, bucket)


def renew(client: redis.Redis, bucket: Bucket) -> Lost | None:
    """Record a heartbeat; return why its owner has to end, None where it may go on.

    The maximum of the last tidying says whether the bucket was scaled down; it is lost when it is another's, available,
    or flushed away.
    """
    why = _repeatable(client, "bucket_renew", bucket.number, bucket.token)
    return None if why is None else why.decode()


def release(client: redis.Redis, bucket: Bucket) -> bool:
    """Give the bucket back; return False when it was not ours any more, or was given back already."""
    return bool(_repeatable(client, "bucket_release", bucket.number, bucket.token))


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


def states(client: redis.Redis) -> dict[str, list[Any]]:
    """Return the numbers of the available buckets, and of the occupied ones number, since and token."""
    return {"available": available(client), "occupied": [one._asdict() for one in held(client)]}


def _repeatable(client: redis.Redis, script: str, *args: str | float) -> Any:
    """Run a script that changes nothing more when it is run twice, once more where its reply was lost."""
    try:
        return call(client, script, keys=KEYS, args=[*args])
    except (redis.ConnectionError, redis.TimeoutError):
        return call(client, script, keys=KEYS, args=[*args])
