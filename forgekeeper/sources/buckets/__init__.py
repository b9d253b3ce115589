"""Buckets: the shares of a batch's rows, and its capacity.

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

from forgekeeper.api.buckets import COUNTED
from forgekeeper.platform.connections import add_scripts, call
from forgekeeper.platform.coordination.values import DECLARED, is_whole, moment, text

add_scripts("forgekeeper.sources.buckets")

Lost = Literal["scale_down", "bucket_lost"]
"""Why an owner has to end: its bucket exists no longer, or is not its own any more."""


@dataclass(frozen=True)
class Bucket:
    """A claim: the classes whose number modulo *modulus* is *number*, whatever the maximum becomes meanwhile."""

    number: int
    modulus: int
    token: str


class OccupiedBucket(NamedTuple):
    """An occupied bucket, for people; without *token* it was not claimed here."""

    number: int
    since: datetime
    token: str | None


class BucketSet:
    """The buckets of a *name*, with their keys in Redis.

    *available* has numbers, *occupied* numbers by the second of the last heartbeat, *owners* tokens by number.  *state*
    has `max_buckets`, the maximum of the last tidying, and `last_claimed`.
    """

    def __init__(self, name: str) -> None:
        self.available_key, self.occupied_key = f"{{{name}}}:available_buckets", f"{{{name}}}:occupied_buckets"
        self.owners_key, self.state_key = f"{{{name}}}:bucket_owners", f"{{{name}}}:bucket_state"
        self.keys = [self.available_key, self.occupied_key, self.owners_key, self.state_key]

    def declare(self) -> None:
        """Let `check` look whether the keys are of their types."""
        DECLARED.update(zip(self.keys, ("set", "zset", "hash", "hash"), strict=True))

    def tidy(
        self, client: redis.Redis, max_buckets: int, *, silent_for: timedelta = timedelta(minutes=10)
    ) -> dict[str, int]:
        """Make each bucket below *max_buckets* exist exactly once; return the counts before, by fields of the result.

        Buckets whose owner has been silent for *silent_for* or longer become available, missing ones are added,
        available ones that no longer exist are dropped; an occupied one stays with its owner.  Silent owners count as
        occupying.
        """
        found = self._repeatable(client, "bucket_tidy", max_buckets, silent_for.total_seconds())
        return dict(zip(COUNTED, (max_buckets, *found), strict=True))

    def claim(self, client: redis.Redis, max_buckets: int, *, child: str | None = None) -> Bucket | None:
        """Claim a bucket below *max_buckets*: that of an earlier start of the *child*, or else an available bucket.

        Return None if there is neither.  An earlier start that still works learns from `renew` that its bucket is lost.
        """
        token = f"{child} {uuid4().hex}" if child else uuid4().hex
        number = call(client, "bucket_claim", keys=self.keys, args=[max_buckets, token])
        return None if number is None else Bucket(number, max_buckets, token)

    @contextmanager
    def claimed(self, client: redis.Redis, max_buckets: int, *, child: str | None = None) -> Iterator[Bucket | None]:
        """Hold the bucket that `claim` returns; give it back on every way out."""
        bucket = self.claim(client, max_buckets, child=child) if max_buckets else None
        try:
            yield bucket
        finally:
            if bucket is not None:
                self.release(client, bucket)

    def renew(self, client: redis.Redis, bucket: Bucket) -> Lost | None:
        """Record a heartbeat; return why its owner has to end, None if it may continue.

        The maximum of the last tidying says whether the bucket was scaled down.  It is lost if another owner has it, or
        if it is available or was flushed away.
        """
        why = self._repeatable(client, "bucket_renew", bucket.number, bucket.token)
        return None if why is None else why.decode()

    def release(self, client: redis.Redis, bucket: Bucket) -> bool:
        """Give the bucket back; return False if it was not ours any more, or was given back already."""
        return bool(self._repeatable(client, "bucket_release", bucket.number, bucket.token))

    def available(self, client: redis.Redis) -> list[int]:
        """List the buckets that a claim could have now."""
        return sorted(int(member) for member in client.smembers(self.available_key) if is_whole(member))

    def held(self, client: redis.Redis) -> list[OccupiedBucket]:
        """List the occupied buckets, the one silent longest first; *since* is its owner's last heartbeat."""
        with client.pipeline() as pipe:
            pipe.zrange(self.occupied_key, 0, -1, withscores=True)
            pipe.hgetall(self.owners_key)
            occupied, owners = pipe.execute()
        return [
            OccupiedBucket(int(member), moment(since), text(owners[member]) if member in owners else None)
            for member, since in occupied
            if is_whole(member)
        ]

    def states(self, client: redis.Redis) -> dict[str, list[Any]]:
        """Return the numbers of the available buckets, and of the occupied ones number, since and token."""
        return {"available": self.available(client), "occupied": [one._asdict() for one in self.held(client)]}

    def _repeatable(self, client: redis.Redis, script: str, *args: str | float) -> Any:
        """Run a script that changes nothing more if it is run twice; run it once more if its reply was lost."""
        try:
            return call(client, script, keys=self.keys, args=[*args])
        except (redis.ConnectionError, redis.TimeoutError):
            return call(client, script, keys=self.keys, args=[*args])
