"""Destroy expired CI artifacts, several workers at a time (batch 11).

Every five minutes the parent looks after the buckets, each a share of all artifacts, and
starts a child for each that is free.  A child claims a bucket and destroys what has
expired in it, a hundred artifacts at a time, for at most five minutes; if there is more,
its successor goes on.  Their objects are deleted by `delete_objects`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Literal

import dramatiq
import peewee as pw
import structlog

from coordination import buckets
from coordination.buckets import Bucket, Hold
from models import FeatureFlag, JobArtifact, now, reachable
from models.job_artifacts import CLASSES, START
from workers import child as children
from workers.attempt import current
from workers.broker import broker
from workers.clients import client
from workers.deadline import Deadline
from workers.failpoints import failpoint

FLAG = "bulk_delete_job_artifacts"
HIGH_CONCURRENCY_FLAG = "bulk_delete_job_artifacts_high_concurrency"
MAX_BUCKETS, MAX_BUCKETS_HIGH_CONCURRENCY = 5, 10
PARENT_BUDGET = timedelta(seconds=60)
BATCH_SIZE = 100
LOOP_LIMIT = 500
MAX_RUNTIME = timedelta(minutes=5)

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Outcome:
    """The buckets as the parent found them, and how many children it started."""

    max_buckets: int = 0
    available_count: int = 0
    occupied_count: int = 0
    stale_count: int = 0
    missing_count: int = 0
    children_enqueued: int = 0


@dataclass(frozen=True)
class BucketOutcome:
    """What a child came to."""

    bucket: int | None = None
    destroyed: int = 0
    bytes: int = 0
    stopped: Literal["drained", "deadline", "loop_limit", "scale_down", "no_bucket"] = "no_bucket"


@dramatiq.actor(broker=broker, queue_name="cron", document=11, time_limit=600_000)
def expired_job_artifacts() -> None:
    """Run the batch for the message's row."""
    attempt = current()
    attempt.deadline(PARENT_BUDGET)
    attempt.outcome = Outcome()
    limit = _max_buckets()
    if not limit:
        attempt.skipped = "flag_off" if limit == 0 else "flag_unreadable"
        return
    counts = buckets.tidy(client, limit, silent_for=attempt.settings.bucket_silent_after)
    free = buckets.available(client)
    sent = attempt.fan_out(delete_artifact_bucket, [(f"delete_artifact_bucket:{number}", ()) for number in free])
    failpoint("expired_job_artifacts.enqueued")
    attempt.outcome = Outcome(**asdict(counts), children_enqueued=sent.enqueued)


@dramatiq.actor(broker=broker, queue_name="artifacts", child=True, time_limit=1_200_000)
def delete_artifact_bucket() -> None:
    """Work on one bucket, and leave a successor while there is more in it."""
    child = children.current()
    deadline = child.deadline(MAX_RUNTIME, pace=child.settings.pace(expired_job_artifacts.actor_name))
    child.outcome = run(deadline, grace=child.settings.object_grace)
    child.more = child.outcome.stopped in ("deadline", "loop_limit")


def run(deadline: Deadline, *, grace: timedelta) -> BucketOutcome:
    """Claim a bucket and destroy what has expired in it; give the bucket back on every way out."""
    limit = _max_buckets()
    bucket = buckets.claim(client, limit) if limit else None
    if bucket is None:
        return BucketOutcome()
    try:
        failpoint("delete_artifact_bucket.claimed")
        outcome = _destroy(bucket, deadline, grace)
        failpoint("delete_artifact_bucket.finished")
        return outcome
    finally:
        buckets.release(client, bucket)


def _destroy(bucket: Bucket, deadline: Deadline, grace: timedelta) -> BucketOutcome:
    instant, destroyed, size, loops = now(), 0, 0, 0
    for number in range(bucket.number, CLASSES, bucket.modulus):
        position = START
        while True:
            batch = JobArtifact.destroy_expired(number, instant, position, limit=BATCH_SIZE, grace=grace)
            failpoint("delete_artifact_bucket.destroyed")
            if batch.reached is None:
                break
            position, loops = batch.reached, loops + 1
            destroyed, size = destroyed + batch.artifacts, size + batch.bytes
            if stopped := _stopped(bucket, deadline, batch.artifacts, loops):
                return BucketOutcome(bucket.number, destroyed, size, stopped)
    return BucketOutcome(bucket.number, destroyed, size, "drained")


def _stopped(
    bucket: Bucket, deadline: Deadline, destroyed: int, loops: int
) -> Literal["deadline", "loop_limit", "scale_down"] | None:
    if deadline.passed(destroyed):
        return "deadline"
    if loops >= LOOP_LIMIT:
        return "loop_limit"
    return None if buckets.renew(client, bucket) is Hold.OURS else "scale_down"


def _max_buckets() -> int | None:
    """Read the flags; 0 when artifacts are not to be deleted, None when nobody can say whether they are."""
    try:
        if not FeatureFlag.is_on(FLAG):
            return 0
        return MAX_BUCKETS_HIGH_CONCURRENCY if FeatureFlag.is_on(HIGH_CONCURRENCY_FLAG) else MAX_BUCKETS
    except pw.PeeweeException:
        if not reachable():
            raise
        log.exception("feature flag unreadable", flag=FLAG)
        return None
