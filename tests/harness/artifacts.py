"""Insert job artifacts, destroy them by class without buckets, and run a child of batch 11."""

from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

from forgekeeper.api.batches import FeatureFlag
from forgekeeper.audit.deletions import Audit
from forgekeeper.engine import statement
from forgekeeper.engine.rows import RowDeletionPass, insert_objects
from forgekeeper.engine.run import Run
from forgekeeper.guards.deadline import Deadline
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database
from forgekeeper.platform.database.queries import START_POSITION
from forgekeeper.sources.buckets import BucketSet
from forgekeeper.sources.outbox import DeletedObject
from models import CLASS_COUNT, JobArtifact, ProjectStatistics
from tests.harness.performing import perform
from tests.harness.settings import settings_with
from workers.expired_job_artifacts import (
    BATCH_SIZE,
    FLAG,
    HIGH_CONCURRENCY_FLAG,
    MAX_RUNTIME,
    delete_artifact_bucket,
)

buckets = BucketSet("bulk_delete_expired_job_artifacts")
NO_GRACE = timedelta(0)
NONE_BAD = SimpleNamespace(keys=frozenset())
BUCKETS, MANY_BUCKETS = 5, 10
PROJECTS = 97
UNLOCKED, ARCHIVE = 0, 1
NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
HOUR = timedelta(hours=1)
# Deletable artifacts only, of class 0 unless *step* is 1; a higher id expired later.
ADD_DUE = """
    insert into ci_job_artifacts (id, project_id, job_id, file_type, file_final_path, size, expire_at, locked)
    select id, 1 + mod(id, 7), {step} * id - 1 - mod(id, 7), 1, 'due/' || id, id,
        now() - interval '30 days' + id * interval '1 millisecond', 0
    from generate_series({first}, {last}) as id
"""
# Artifacts of all kinds: traces, locked, of unknown lock, fresh, and without expiry.
ADD_MIXED = """
    insert into ci_job_artifacts (id, project_id, job_id, file_type, file_store, file_final_path, size, expire_at, locked)
    select id, 1 + mod(id, {projects}), id / 3, case when mod(id, 11) = 0 then 3 else 1 end, 1 + mod(id, 2),
        'ab/' || mod(id, 256) || '/' || id,
        case when mod(id, 13) = 0 then null else mod(id * 7919, 1000003) end,
        case mod(id, 5) when 0 then now() + interval '1 day' when 1 then null
            else now() - interval '30 days' + id * interval '1 millisecond' end,
        case mod(id, 17) when 0 then 1 when 1 then 2 else 0 end
    from generate_series(1, {count}) as id
"""
ADD_STATISTICS = """
    insert into project_statistics (project_id, build_artifacts_size)
    select project_id, 1000 + coalesce(sum(size), 0) from ci_job_artifacts group by project_id
"""
DELETABLE = "expire_at < now() and locked = 0 and file_type <> 3"
# Statistics that differ from the sum of the remaining artifacts, to the byte.
WRONG_STATISTICS = """
    select project_id, build_artifacts_size, left_over from project_statistics
    left join (select project_id, sum(size) as left_over from ci_job_artifacts group by project_id) as artifacts
        using (project_id)
    where build_artifacts_size <> 1000 + coalesce(left_over, 0)
"""


def artifact(*, number=0, size=10, path="ab/cd/artifact", project=1, expire_at=NOON - HOUR, **facts):
    """Add an artifact of class *number*."""
    return JobArtifact.create(
        project_id=project,
        job_id=10 * project + number - project,
        file_final_path=path,
        size=size,
        expire_at=expire_at,
        **{"locked": UNLOCKED, "file_type": ARCHIVE} | facts,
    ).id


def due_artifacts(count, *, first=1, step=CLASS_COUNT):
    database.execute_sql(ADD_DUE.format(first=first, last=first + count - 1, step=step))


def mixed_artifacts(count):
    database.execute_sql(ADD_MIXED.format(count=count, projects=PROJECTS))
    database.execute_sql(ADD_STATISTICS)
    database.execute_sql("analyze ci_job_artifacts, project_statistics")


def ids():
    return {row.id for row in JobArtifact.select(JobArtifact.id)}


def outbox():
    return sorted(row.path for row in DeletedObject.select())


def statistics(project=1):
    return ProjectStatistics.get_by_id(project).build_artifacts_size


def rows(sql):
    return database.execute_sql(sql).fetchall()


def count(condition):
    return rows(f"select count(*) from ci_job_artifacts where {condition}")[0][0]


def list_plan_nodes(plan):
    yield plan
    for child in plan.get("Plans", ()):
        yield from list_plan_nodes(child)


def turn_on(*, high_concurrency=False):
    """Turn the flags on and create the buckets, as the parent does."""
    FeatureFlag.turn(FLAG, on=True)
    FeatureFlag.turn(HIGH_CONCURRENCY_FLAG, on=high_concurrency)
    buckets.tidy(client, MANY_BUCKETS if high_concurrency else BUCKETS)


def run(*, objects="ours", unknown_locks="keep", **options):
    deadline = Deadline(MAX_RUNTIME, **options)
    settings = settings_with(object_grace=NO_GRACE, objects=objects, unknown_locks=unknown_locks)
    return perform(delete_artifact_bucket, deadline=deadline, settings=settings)


@contextmanager
def without_table(table):
    database.execute_sql(f"alter table {table} rename to away")
    try:
        yield
    finally:
        database.execute_sql(f"alter table away rename to {table}")


class Chunk(NamedTuple):
    """Result of a chunk; the artifacts of the projects in *held_up* were kept."""

    artifacts: int
    bytes: int
    reached: Any
    held_up: list[int]


def due_in_class(number, at):
    (due,) = delete_artifact_bucket.shown_rows[0](at, settings_with())
    return due.in_class(number)


def destroy_chunk(number, at, *, after=START_POSITION, limit=BATCH_SIZE, grace=NO_GRACE, audit=None):
    """Destroy up to *limit* artifacts of class *number* that have expired at the time *at*, from a position on."""
    audit = audit or Audit("expired_job_artifacts", on=False)
    outcome, deadline = delete_artifact_bucket.outcome(), Deadline(MAX_RUNTIME)
    run = Run(
        delete_artifact_bucket, settings_with(object_grace=grace), outcome=outcome, deadline=deadline, audit=audit
    )
    sweep = RowDeletionPass(run, due_in_class(number, at))
    sweep._position = after
    reached = sweep._delete_next(NONE_BAD, limit, None)
    return Chunk(outcome.destroyed, outcome.bytes, reached, sorted(sweep._locked_totals))


def chunk_statement(number, at):
    """Return the statement of a chunk of class *number* without audit, and its values except the position."""
    due = insert_objects(due_in_class(number, at), settings_with(object_grace=NO_GRACE))
    statements = statement.RowStatements(due)
    return statements.write_delete(statement.RowChunk(limit=BATCH_SIZE)), statements.sql_values
