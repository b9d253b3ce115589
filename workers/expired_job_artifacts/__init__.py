"""Destroy expired CI artifacts, several workers at a time (batch 11).

Every five minutes the parent looks after the buckets, shares of all artifacts, and starts children until there are as
many as buckets.  A child claims a bucket and destroys the expired artifacts in it, a hundred at a time, for at most
five minutes; if there are more, its successor continues.  The same statement adds the objects to the outbox of
`delete_objects`, and subtracts the bytes from the statistics.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from forgekeeper import (
    Blocked,
    Buckets,
    Children,
    Classes,
    Outbox,
    Record,
    Rows,
    Spared,
    Subject,
    Threshold,
    Total,
    batch,
    child,
)
from forgekeeper.api.answers import Backlog
from forgekeeper.api.shown import Look, Part
from forgekeeper.engine.rows import parts_of
from forgekeeper.engine.work import settings
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database, now, queries, survey
from forgekeeper.platform.database.exclusions import visible
from forgekeeper.platform.database.survey import literal
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.outbox import DeletedObject
from metrics.catalogue import Gauge, Reading
from models import (
    CLASS,
    CLASSES,
    FOLLOWERS,
    MAY_GO,
    WAITS,
    ForgeOutbox,
    JobArtifact,
    JobLock,
    ProjectGroup,
    ProjectStatistics,
    StatisticsRefresh,
)
from workers.expired_job_artifacts.destroyed import RECORD, count_recoverable
from workers.expired_job_artifacts.restoring import AUDITED, describe_obstacle

FLAG = "bulk_delete_job_artifacts"
HIGH_CONCURRENCY_FLAG = "bulk_delete_job_artifacts_high_concurrency"
MAX_BUCKETS, MAX_BUCKETS_HIGH_CONCURRENCY = 5, 10
PARENT_BUDGET = timedelta(seconds=60)
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
KEPT = {"trace": "file_type = 3", "locked": "file_type <> 3 and locked = 1", **WAITS}

# One look into the index for each class of artifacts.
OF_EACH_CLASS = f"""
    from generate_series(0, {CLASSES - 1}) as class, lateral (
        select expire_at from ci_job_artifacts
        where {CLASS} = class and expire_at < %(now)s and {MAY_GO}{{but}}
        order by expire_at, id limit %(bound)s
    ) as expired"""
OLDEST = f"select min(expire_at) {OF_EACH_CLASS}"
HOW_MANY = f"select count(*) from (select {OF_EACH_CLASS} limit %(bound)s) as due"

NO_RULE = (
    "FORGEKEEPER_UNKNOWN_LOCKS is resolve, and the forge has no relation ci_job_locks (job_id, locked) that says"
    " whether the artifacts of a job are locked: make one, or set it to keep"
)
COUNTED_WITHIN = 1.0
"""Seconds: an index of its own counts what waits; a forge that lacks it is not read from end to end."""


@dataclass
class BucketOutcome:
    """The result of a child; it grows with each statement."""

    bucket: int | None = None
    destroyed: int = 0
    bytes: int = 0
    stopped: str = "no_bucket"


@batch(
    document=11,
    cron="*/5 * * * *",
    budget=PARENT_BUDGET,
    time_limit=timedelta(minutes=2),
    buckets=BUCKETS,
    tables=[
        *(JobArtifact, ProjectStatistics, DeletedObject, StatisticsRefresh, JobLock, ProjectGroup),
        ForgeOutbox,
    ],
    reads=FOLLOWERS,
    flag=FLAG,
    flags={
        FLAG: "Delete expired job artifacts at all (batch 11).",
        HIGH_CONCURRENCY_FLAG: "Delete them in ten buckets instead of five.",
    },
    thresholds=[Threshold("duration", above=60), Threshold("consecutive_failures", above=3)],
    commands="workers.expired_job_artifacts.commands",
)
def expired_job_artifacts(now: datetime) -> Children:
    """Destroy expired CI artifacts in parallel buckets."""
    if settings().unknown_locks == "resolve" and not visible(JobLock):
        raise Blocked("schema", NO_RULE)
    return Children(delete_artifact_bucket, BUCKETS)


@child(
    expired_job_artifacts,
    queue="artifacts",
    budget=MAX_RUNTIME,
    time_limit=timedelta(minutes=7),
    outcome=BucketOutcome,
    records=[
        Record(
            RECORD,
            examined=("destroyed",),
            processed=("destroyed",),
            errors={"database": ()},
            objective=timedelta(hours=24),
            bytes=("bytes",),
            excluded_by=("project", "pattern"),
        ),
    ],
    collector="artifacts",
)
def delete_artifact_bucket(now: datetime) -> Rows[JobArtifact]:
    """Work on one bucket, and leave a successor while there is more in it."""
    return expired(now, resolves=settings().unknown_locks == "resolve")


def expired(now: datetime, *, resolves: bool = False) -> Rows[JobArtifact]:
    """Return the expired artifacts; those of unknown lock are among them if the forge's rule *resolves* it."""
    return Rows(
        JobArtifact,
        JobArtifact.is_expired(now),
        or_where=JobArtifact.is_expired_by_rule(now) if resolves else None,
        classes=Classes(CLASS, CLASSES),
        since=JobArtifact.expire_at,
        chunk=BATCH_SIZE,
        record=RECORD,
        counted="destroyed",
        counted_bytes="bytes",
        name=JobArtifact.file_final_path,
        audit=AUDITED,
        restorable=True,
        project=JobArtifact.project_id,
        size=JobArtifact.size,
        cascades_to=FOLLOWERS,
        shows_followers=False,
        outbox=Outbox(JobArtifact.file_final_path, location=JobArtifact.file_store, theirs=ForgeOutbox),
        total=Total(ProjectStatistics.build_artifacts_size, of=JobArtifact.project_id),
        stays=KEPT,
        spared=[
            Spared("statistics_recounted", StatisticsRefresh, StatisticsRefresh.is_under_way(JobArtifact.project_id))
        ],
    )


expired_job_artifacts.audited(
    Subject(
        "artifact",
        "ID",
        RECORD,
        gone="was destroyed",
        because="it had expired at {due}, was unlocked and no trace",
        restore="forgekeeper objects hold --artifact {id}",
        restore_run="forgekeeper objects hold --run {run}",
        undone="rows and objects come back until their objects go: FORGEKEEPER_OBJECT_GRACE after them",
        kept="object_grace",
        obstacle=describe_obstacle,
        count_recoverable=count_recoverable,
        is_there=lambda number: JobArtifact.select().where(JobArtifact.id == number).exists(),
    )
)


@delete_artifact_bucket.backlog(RECORD)
def due(now: datetime) -> Backlog:
    """Count the artifacts that may be destroyed."""
    found = _ask(OLDEST, now, 1), _by_rule("min(expire_at)", now, queries.BOUND)
    return Backlog(_count(now, queries.BOUND), min((one for one in found if one), default=None))


@expired_job_artifacts.at_stake
def at_stake(now: datetime) -> queries.Stake:
    """Look at the artifacts that may be destroyed, of all."""
    return queries.Stake(partial(_count, now), queries.Stake.rows(JobArtifact.select()).of)


def _count(now: datetime, bound: int) -> int:
    return int(_ask(HOW_MANY, now, bound)) + int(_by_rule("count(*)", now, bound) or 0)


def _by_rule(what: str, now: datetime, bound: int) -> Any:
    """Ask for the same of those whose jobs unlock them, where these go."""
    if client.settings is None or client.settings.unknown_locks == "keep" or not visible(JobLock):
        return None
    by_rule = expired(now, resolves=True).by_index()[1]
    rows = by_rule.bind(expired_job_artifacts.name, now).select(JobArtifact.expire_at)
    return database.execute_sql(f"select {what} from ({literal(*rows.limit(bound).sql())}) as due", {}).fetchone()[0]


def _ask(statement: str, now: datetime, bound: int) -> Any:
    kept = expired(now).bind(expired_job_artifacts.name, now).written().values()
    but = "".join(f" and ({condition}) is not true" for condition in kept)
    return database.execute_sql(statement.format(but=but), {"now": now, "bound": bound}).fetchone()[0]


@delete_artifact_bucket.preview
def previewed(look: Look) -> Iterator[Part]:
    """Count the artifacts that would be destroyed, all buckets together, and the expired ones that stay."""
    for rows in show_rows(look.now, look.settings):
        yield from parts_of(rows, look)


@delete_artifact_bucket.shows_rows
def show_rows(now: datetime, settings: Settings) -> list[Rows[JobArtifact]]:
    """Return the artifacts that would be destroyed, all buckets together."""
    return [expired(now, resolves=settings.unknown_locks == "resolve")]


@expired_job_artifacts.collector(
    "waiting_artifacts",
    gauges=[
        Gauge(
            "waiting_artifacts",
            "Expired artifacts that stay until the forge says more of them (counted up to a bound).",
            ("reason",),
            tuple((reason,) for reason in WAITS),
        )
    ],
)
def waiting(_settings: Settings) -> Iterator[Reading]:
    """Count the artifacts that stay until the forge says more of them; leave out what takes too long to count."""
    instant = now()
    for reason in WAITS:
        found = partial(queries.count, JobArtifact.waiting(reason, instant))
        if (records := survey.within(time.monotonic() + COUNTED_WITHIN, found)) is not None:
            yield Reading("waiting_artifacts", records, (reason,))
