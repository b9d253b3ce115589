"""Destroy expired CI artifacts, several workers at a time (batch 11).

Every five minutes the parent starts children, up to the number of buckets, which are equal shares of all
artifacts.  A child claims a bucket and destroys the expired artifacts in it, a hundred at a time, for at most five
minutes; if there are more, its successor continues.  The same statement inserts the objects into the outbox of
`delete_objects`, and subtracts the bytes from the statistics.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from forgekeeper import (
    Blocked,
    Buckets,
    Children,
    Classes,
    Kept,
    Outbox,
    Rows,
    Subject,
    Threshold,
    Total,
    batch,
    child,
    settings,
)
from models import (
    CLASS_COUNT,
    CLASS_EXPRESSION,
    FOLLOWER_MODELS,
    WAITING_CONDITIONS,
    ForgeOutbox,
    JobArtifact,
    JobLock,
    ProjectGroup,
    ProjectStatistics,
    StatisticsRefresh,
)

FLAG = "bulk_delete_job_artifacts"
HIGH_CONCURRENCY_FLAG = "bulk_delete_job_artifacts_high_concurrency"
MAX_BUCKETS, MAX_BUCKETS_HIGH_CONCURRENCY = 5, 10
BATCH_SIZE, LOOP_LIMIT = 100, 500
MAX_RUNTIME = timedelta(minutes=5)
BUCKETS = Buckets(
    "bulk_delete_expired_job_artifacts",
    count=MAX_BUCKETS,
    count_with={HIGH_CONCURRENCY_FLAG: MAX_BUCKETS_HIGH_CONCURRENCY},
    loop_limit=LOOP_LIMIT,
    prefix="",
    called="artifact",
)
NO_LOCK_RULE_ERROR = (
    "FORGEKEEPER_UNKNOWN_LOCKS is resolve, but the forge lacks the relation ci_job_locks (job_id, locked) with the"
    " locks of jobs' artifacts: create it, or set FORGEKEEPER_UNKNOWN_LOCKS to keep"
)


@batch(
    document=11,
    cron="*/5 * * * *",
    budget=timedelta(seconds=60),
    time_limit=timedelta(minutes=2),
    buckets=BUCKETS,
    # Exclusions of groups read the second table.
    tables=[JobLock, ProjectGroup],
    flag=FLAG,
    flags={
        FLAG: "Delete expired job artifacts (batch 11).",
        HIGH_CONCURRENCY_FLAG: "Delete expired job artifacts in ten buckets instead of five.",
    },
    thresholds=[Threshold("duration", above=60), Threshold("consecutive_failures", above=3)],
)
def expired_job_artifacts(now: datetime) -> Children:
    """Destroy expired CI artifacts in parallel buckets."""
    if settings().unknown_locks == "resolve" and not JobLock.is_known():
        raise Blocked("schema", NO_LOCK_RULE_ERROR)
    return Children(delete_artifact_bucket, BUCKETS)


@child(
    expired_job_artifacts,
    queue="artifacts",
    budget=MAX_RUNTIME,
    time_limit=timedelta(minutes=7),
    collector="artifacts",
)
def delete_artifact_bucket(now: datetime) -> Rows[JobArtifact]:
    """Destroy the expired artifacts of one bucket, and start a successor if more are left."""
    resolves_locks = settings().unknown_locks == "resolve"
    return Rows(
        JobArtifact,
        JobArtifact.is_expired(now),
        or_where=JobArtifact.is_expired_by_rule(now) if resolves_locks else None,
        or_needs=JobLock,
        since=JobArtifact.expire_at,
        classes=Classes(CLASS_EXPRESSION, CLASS_COUNT),
        chunk=BATCH_SIZE,
        objective=timedelta(hours=24),
        record="expired_artifact",
        called=Subject(
            "artifact",
            "ID",
            "expired_artifact",
            gone="was destroyed",
            because="it had expired at {due}, was unlocked and was not a trace",
        ),
        counted="destroyed",
        counted_bytes="bytes",
        name=JobArtifact.file_final_path,
        project=JobArtifact.project_id,
        size=JobArtifact.size,
        total=Total(ProjectStatistics.build_artifacts_size, of=JobArtifact.project_id),
        outbox=Outbox(JobArtifact.file_final_path, location=JobArtifact.file_store, theirs=ForgeOutbox),
        restorable=True,
        audit={"path": "file_final_path", "bytes": "size"},
        # A part of the artifact, which the forge deletes with the artifact.
        cascades_to=FOLLOWER_MODELS,
        shows_followers=False,
        kept=[Kept("statistics_recounted", StatisticsRefresh, StatisticsRefresh.is_under_way(JobArtifact.project_id))],
        stays={"trace": "file_type = 3", "locked": "file_type <> 3 and locked = 1"},
        waits=WAITING_CONDITIONS,
    )
