"""Buckets: the shares of a batch's rows, and its capacity.

Each bucket below the maximum is either available or occupied by one owner, identified by the token of its claim.
Nobody waits for a bucket.  A child that is restarted, for example after the death of its worker, gets its earlier
bucket back: otherwise a death per bucket would stop all deletion.  An owner without a heartbeat for ten minutes loses
its bucket to the next tidying.  If an earlier owner still works, `renew` tells it at its next safe point, and row locks
protect the rows until then.

Every script is atomic and uses Redis's clock.  A claim whose reply is lost keeps its bucket until its child is
restarted, for ten minutes at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple
from uuid import uuid4

import redis

from forgekeeper.api.buckets import BUCKET_COUNT_FIELDS
from forgekeeper.platform.connections import add_scripts, run_script
from forgekeeper.platform.coordination.redis_values import KEY_TYPES, decode_text, is_count, to_datetime

add_scripts("forgekeeper.sources.buckets")

BucketStopReason = Literal["scale_down", "bucket_lost"]
"""Reasons why an owner has to end: its bucket no longer exists, or belongs to another owner."""


@dataclass(frozen=True)
class Bucket:
    """A claim of the classes whose number modulo *modulus* is *number*.

    It stays the same if the maximum changes in the meantime.
    """

    number: int
    modulus: int
    token: str


class OccupiedBucket(NamedTuple):
    """An occupied bucket, for display; if *token* is None, the bucket lacks an owner."""

    number: int
    since: datetime
    token: str | None


class BucketSet:
    """The buckets of a *name*, with their keys in Redis.

    *list_available* has numbers, *occupied* numbers by the second of the last heartbeat, *owners* tokens by number.
    *state* has `max_buckets`, the maximum of the last tidying, and `last_claimed`.
    """

    def __init__(self, name: str) -> None:
        self.available_key, self.occupied_key = f"{{{name}}}:available_buckets", f"{{{name}}}:occupied_buckets"
        self.owners_key, self.state_key = f"{{{name}}}:bucket_owners", f"{{{name}}}:bucket_state"
        self.keys = [self.available_key, self.occupied_key, self.owners_key, self.state_key]

    def declare_types(self) -> None:
        """Let `check` compare the types of the keys."""
        KEY_TYPES.update(zip(self.keys, ("set", "zset", "hash", "hash"), strict=True))

    def tidy(
        self, client: redis.Redis, max_buckets: int, *, silent_for: timedelta = timedelta(minutes=10)
    ) -> dict[str, int]:
        """Make each bucket below *max_buckets* exist once; return the earlier counts by field.

        Buckets whose owner has been silent for *silent_for* or longer become available.  Missing buckets are added.
        Available buckets beyond the maximum are removed; occupied buckets stay with their owner.  Silent owners count
        as occupying.
        """
        found = self._call_idempotent(client, "bucket_tidy", max_buckets, silent_for.total_seconds())
        return dict(zip(BUCKET_COUNT_FIELDS, (max_buckets, *found), strict=True))

    def claim(self, client: redis.Redis, max_buckets: int, *, child: str | None = None) -> Bucket | None:
        """Claim the *child*'s earlier bucket or an available bucket, below *max_buckets*.

        Return None if neither exists.  An earlier start that still works learns from `renew` that its bucket is lost.
        """
        token = f"{child} {uuid4().hex}" if child else uuid4().hex
        number = run_script(client, "bucket_claim", keys=self.keys, args=[max_buckets, token])
        return None if number is None else Bucket(number, max_buckets, token)

    @contextmanager
    def hold_bucket(
        self, client: redis.Redis, max_buckets: int, *, child: str | None = None
    ) -> Iterator[Bucket | None]:
        """Hold the bucket that `claim` returns during the block, and always release it."""
        bucket = self.claim(client, max_buckets, child=child) if max_buckets else None
        try:
            yield bucket
        finally:
            if bucket is not None:
                self.release(client, bucket)

    def renew(self, client: redis.Redis, bucket: Bucket) -> BucketStopReason | None:
        """Record a heartbeat; return why the bucket's owner has to end, None if it may continue.

        A bucket is scaled down if its number is not below the maximum of the last tidying.  It is lost if another owner
        has it, or if it is available or was flushed.
        """
        why = self._call_idempotent(client, "bucket_renew", bucket.number, bucket.token)
        return None if why is None else why.decode()

    def release(self, client: redis.Redis, bucket: Bucket) -> bool:
        """Release the bucket; return False if it was not ours any more, or released already."""
        return bool(self._call_idempotent(client, "bucket_release", bucket.number, bucket.token))

    def list_available(self, client: redis.Redis) -> list[int]:
        """List the available buckets."""
        return sorted(int(member) for member in client.smembers(self.available_key) if is_count(member))

    def list_occupied(self, client: redis.Redis) -> list[OccupiedBucket]:
        """List the occupied buckets, oldest heartbeat first; *since* is the last heartbeat."""
        with client.pipeline() as pipe:
            pipe.zrange(self.occupied_key, 0, -1, withscores=True)
            pipe.hgetall(self.owners_key)
            occupied, owners = pipe.execute()
        return [
            OccupiedBucket(int(member), to_datetime(since), decode_text(owners[member]) if member in owners else None)
            for member, since in occupied
            if is_count(member)
        ]

    def read_states(self, client: redis.Redis) -> dict[str, list[Any]]:
        """Return the numbers of available buckets, and the occupied buckets as dictionaries."""
        return {
            "available": self.list_available(client),
            "occupied": [one._asdict() for one in self.list_occupied(client)],
        }

    def _call_idempotent(self, client: redis.Redis, script: str, *args: str | float) -> Any:
        """Run an idempotent script; retry it once if its reply was lost."""
        try:
            return run_script(client, script, keys=self.keys, args=[*args])
        except (redis.ConnectionError, redis.TimeoutError):
            return run_script(client, script, keys=self.keys, args=[*args])
