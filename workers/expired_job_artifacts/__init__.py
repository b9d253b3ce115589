"""Destroy expired CI artifacts, several workers at a time (batch 11).

Every five minutes the parent looks after the buckets, shares of all artifacts, and starts children until there are as
many as buckets.  A child claims a bucket and destroys the expired artifacts in it, a hundred at a time, for at most
five minutes; if there are more, its successor continues.  The same statement adds the objects to the outbox of
`delete_objects`, and subtracts the bytes from the statistics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from itertools import count
from typing import Any, Literal

import peewee as pw
import structlog

from forgekeeper import (
    Blocked,
    Children,
    Counter,
    Note,
    Record,
    Rows,
    Skip,
    Spared,
    Subject,
    Threshold,
    Total,
    batch,
    child,
)
from forgekeeper.api.answers import Backlog
from forgekeeper.api.batches import FeatureFlag
from forgekeeper.api.shown import Look, Part
from forgekeeper.engine.rows import parts_of
from forgekeeper.engine.work import get_child_key, settings
from forgekeeper.ledger.holds import idle
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database, now, queries, reachable, survey
from forgekeeper.platform.database.exclusions import visible
from forgekeeper.platform.database.survey import literal
from forgekeeper.platform.failpoints import failpoint
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.outbox import DeletedObject
from metrics.catalogue import Gauge, Reading, at
from metrics.logs import describe
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
from workers.expired_job_artifacts import buckets
from workers.expired_job_artifacts.buckets import Bucket, Lost
from workers.expired_job_artifacts.destroyed import RECORD, count_recoverable
from workers.expired_job_artifacts.restoring import AUDITED, describe_obstacle

FLAG = "bulk_delete_job_artifacts"
HIGH_CONCURRENCY_FLAG = "bulk_delete_job_artifacts_high_concurrency"
MAX_BUCKETS, MAX_BUCKETS_HIGH_CONCURRENCY = 5, 10
PARENT_BUDGET = timedelta(seconds=60)
BATCH_SIZE, LOOP_LIMIT = 100, 500
MAX_RUNTIME = timedelta(minutes=5)
"""What an artifact is called in the audit, and when it is bad."""
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
EVERY_CLASS = pw.SQL(f"{CLASS} = any(%s)", [list(range(CLASSES))])
"""Met by all; so PostgreSQL looks into the index that begins with the class."""

TOTAL = Total(ProjectStatistics.build_artifacts_size, of=JobArtifact.project_id)

OUTBOXES = {"ours": "deleted_objects", "theirs": "ci_deleted_objects"}
# Without path and file there is no object to record; with a file alone an artifact does not go (`models.NO_PATH`).
OUTBOX = """
    insert into {table} (project_id, file_store, store_dir, file, pick_up_at)
    -- "/a" must not come out as "a": that would be another object.
    select project_id, file_store, coalesce(folder, ''), case when folder = '' then file_final_path else last end,
        %s::timestamptz
    from deleted,
        lateral (select split_part(file_final_path, '/', -1) as last offset 0) as name,
        lateral (
            select left(file_final_path, greatest(0, length(file_final_path) - length(last) - 1)) as folder offset 0
        ) as place
    where file_final_path <> ''
"""
NO_RULE = (
    "FORGEKEEPER_UNKNOWN_LOCKS is resolve, and the forge has no relation ci_job_locks (job_id, locked) that says"
    " whether the artifacts of a job are locked: make one, or set it to keep"
)
COUNTED_WITHIN = 1.0
"""Seconds: an index of its own counts what waits; a forge that lacks it is not read from end to end."""

log = structlog.get_logger(__name__)


@dataclass
class Outcome:
    """The buckets as the parent found them, and how many children it started."""

    max_buckets: int = 0
    available_count: int = 0
    occupied_count: int = 0
    stale_count: int = 0
    missing_count: int = 0
    children_enqueued: int = 0


@dataclass
class BucketOutcome:
    """What a child comes to; it grows with each statement."""

    bucket: int | None = None
    destroyed: int = 0
    bytes: int = 0
    stopped: Literal["drained", "deadline", "loop_limit", "scale_down", "bucket_lost", "no_bucket"] = "no_bucket"


@batch(
    document=11,
    cron="*/5 * * * *",
    budget=PARENT_BUDGET,
    time_limit=timedelta(minutes=2),
    outcome=Outcome,
    records=[],
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
    counters=[
        Counter("buckets_recovered", "Stale buckets put back (stale_count).", ("stale_count",), by_batch=False),
        Counter("buckets_refilled", "Missing buckets added (missing_count).", ("missing_count",), by_batch=False),
    ],
    thresholds=[Threshold("duration", above=60), Threshold("consecutive_failures", above=3)],
    commands="workers.expired_job_artifacts.commands",
)
def expired_job_artifacts(now: datetime) -> Iterator[Children | Note | Skip]:
    """Destroy expired CI artifacts in parallel buckets."""
    limit = _max_buckets()
    if not limit:
        yield Skip("flag_off")
        return
    if settings().unknown_locks == "resolve" and not visible(JobLock):
        raise Blocked("schema", NO_RULE)
    yield Note(**buckets.tidy(client, limit, silent_for=settings().bucket_silent_after))
    # A child claims any free bucket: its key is not the number of its bucket.  After the third death a child is started
    # again by the parent alone, and finds its own bucket, which is occupied until then.
    yield Children(delete_artifact_bucket, {str(number): () for number in range(limit)})


@child(
    expired_job_artifacts,
    queue="artifacts",
    budget=MAX_RUNTIME,
    time_limit=timedelta(minutes=7),
    outcome=BucketOutcome,
    enqueued_as="children_enqueued",
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
    continues=["deadline", "loop_limit"],
)
def delete_artifact_bucket(now: datetime) -> Generator[Rows[JobArtifact] | Note, None, str]:
    """Work on one bucket, and leave a successor while there is more in it."""
    with buckets.claimed(client, _max_buckets(), child=get_child_key()) as bucket:
        if bucket is None:
            return "no_bucket"
        yield Note(bucket=bucket.number)
        failpoint("delete_artifact_bucket.claimed")
        until = partial(_stopped, bucket, count(1))
        for number in range(bucket.number, CLASSES, bucket.modulus):
            of_class = partial(expired, now, number, grace=settings().object_grace, until=until)
            yield of_class(outbox=settings().objects)
            if settings().unknown_locks == "resolve":
                yield of_class(outbox=settings().objects, by="rule")
        failpoint("delete_artifact_bucket.finished")
    return "drained"


def expired(
    now: datetime,
    number: int | None = None,
    *,
    grace: timedelta = timedelta(0),
    until: Callable[[], str | None] | None = None,
    outbox: Literal["ours", "theirs"] = "ours",
    by: Literal["itself", "rule", "either"] = "itself",
) -> Rows[JobArtifact]:
    """Return the expired artifacts of class *number*, or of all; their objects are due after the *grace*.

    They go into an *outbox*: of ours, which `delete_objects` works off, or the forge's.  They are unlocked *by*
    themselves, or by the forge's rule: each way has an index of its own.
    """
    certain, by_rule = JobArtifact.is_expired(now), JobArtifact.is_expired_by_rule(now)
    where = {"itself": certain, "rule": by_rule, "either": pw.Expression(certain, "OR", by_rule)}
    return Rows(
        JobArtifact,
        where[by],
        share=EVERY_CLASS if number is None else JobArtifact.in_class(number),
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
        also=[pw.SQL(OUTBOX.format(table=OUTBOXES[outbox]), [now + grace])],
        total=TOTAL if visible(ProjectStatistics) else None,
        until=until,
        stays=KEPT,
        spared=[
            Spared("statistics_recounted", StatisticsRefresh, StatisticsRefresh.is_under_way(JobArtifact.project_id))
        ],
    )


def _stopped(bucket: Bucket, loops: Iterator[int]) -> Literal["loop_limit"] | Lost | None:
    """Renew the bucket; say why the child has to end."""
    return "loop_limit" if next(loops) >= LOOP_LIMIT else buckets.renew(client, bucket)


def _max_buckets() -> int:
    """Read the flags; 0 when artifacts are not to be deleted; raise `Blocked` where the flags cannot be read."""
    try:
        if not FeatureFlag.is_on(FLAG):
            return 0
        return MAX_BUCKETS_HIGH_CONCURRENCY if FeatureFlag.is_on(HIGH_CONCURRENCY_FLAG) else MAX_BUCKETS
    except pw.PeeweeException as error:
        if not reachable():
            raise
        log.exception("feature flag unreadable", flag=FLAG)
        raise Blocked("flag_unreadable", f"flag {FLAG} cannot be read ({describe(error)})") from error


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
    rows = expired(now, by="rule").bind(expired_job_artifacts.name, now).select(JobArtifact.expire_at)
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
    return [expired(now, by="either" if settings.unknown_locks == "resolve" else "itself")]


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


@expired_job_artifacts.collector(
    "buckets",
    gauges=[
        Gauge("buckets", "Artifact buckets (available, occupied).", ("state",), (("available",), ("occupied",))),
        Gauge("buckets_limit", "Configured number of buckets (5 or 10); 0 while the batch is held back."),
        Gauge(
            "bucket_oldest_occupied_timestamp_seconds",
            "Last heartbeat of the occupied bucket whose owner has been silent longest; absent when none is occupied.",
        ),
    ],
)
def readings(settings: Settings) -> Iterator[Reading]:
    """Count the buckets; a batch that is held back needs none."""
    yield Reading("buckets_limit", 0 if expired_job_artifacts.name in idle(settings) else _max_buckets())
    held = buckets.held(client)
    yield Reading("buckets", len(buckets.available(client)), ("available",))
    yield Reading("buckets", len(held), ("occupied",))
    yield from at("bucket_oldest_occupied_timestamp_seconds", min((one.since for one in held), default=None))


expired_job_artifacts.status(
    "buckets",
    partial(buckets.states, client),
    lambda found: f"Artifact buckets: {len(found['available'])} available, {len(found['occupied'])} occupied.",
)
