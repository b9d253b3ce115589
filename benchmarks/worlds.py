"""Worlds of any size for curves: a table or register, with due records and others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from pydantic import SecretStr

from benchmarks.uploads import UPLOAD_KEYS
from forgekeeper.api.answers import EnqueueCounts
from forgekeeper.api.batches import BATCHES, FeatureFlag
from forgekeeper.engine.attempt import Runner
from forgekeeper.engine.message_attempt import execute_message
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform.connections import client, process_identity
from forgekeeper.platform.database import database
from forgekeeper.platform.installation import Installation
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.buckets import BucketSet
from forgekeeper.targets.sentinel import Folder
from workers.expired_job_artifacts import BUCKETS, FLAG, MAX_BUCKETS, delete_artifact_bucket

CHUNK = 100_000
"""Entries that a script registers at once, during which Redis answers nobody else."""
PROJECTS = 100
LOCATION = "uploads"
OPTIONS: dict[str, Any] = {"breaker_share": 1, "database_statement_timeout": 600}

ADD_STATUSES = """
    insert into user_statuses (user_id, emoji, message, clear_status_at)
    select first + number, 'palm_tree', 'Away, sample ' || number, now() + {when}
    from (select coalesce(max(user_id), 0) as first from user_statuses) as present,
        generate_series(1, %(count)s) as number
"""
# As in a forge, times, sizes and names of artifacts differ.
ADD_ARTIFACTS = f"""
    insert into ci_job_artifacts (project_id, job_id, file_type, file, file_final_path, size, expire_at, locked)
    select 1 + mod(number, {PROJECTS}), number / 3, 1 + mod(number, 2), 'artifacts.zip',
        left(md5(number::text), 2) || '/' || md5(number::text) || '/@final/' || md5(number::text), mod(number, 1000),
        now() + {{when}}, 0
    from generate_series(1, %(count)s) as number
"""
ADD_STATISTICS = f"""
    insert into project_statistics select project, 1000000000 from generate_series(1, {PROJECTS}) as project
    on conflict do nothing
"""
ADD_SETTLED = """
    insert into settled_uploads (location, path, reaped, settled_at)
    select 'uploads', %(kind)s || gen_random_uuid(), true, now() from generate_series(1, %(count)s)
"""
ADD_PROJECTS = """
    insert into projects select number, 'curve/' || number || '.git' from generate_series(1, %(count)s) as number
"""
ADD_REFS = """
    insert into batched_git_ref_updates_deletions (project_id, ref)
    select 1 + mod(number, %(projects)s), 'refs/heads/' || number from generate_series(1, %(count)s) as number
"""
REGISTER = """
    local now = redis.call('time')[1]
    for number = ARGV[1], ARGV[2] do
      redis.call('zadd', KEYS[1], now - ARGV[3], 'uploads:' .. ARGV[4] .. '/' .. number)
    end
"""
FRESH, PAST = "interval '1 day' + number * interval '1 ms'", "interval '-1 hour' - number * interval '1 ms'"
YESTERDAY = 86_400


@dataclass(frozen=True)
class World:
    """Data of a batch: *fill* adds records to keep, *add* adds due records.

    *churn* adds due records and deletes as many. *work* processes the due records, and returns their number and the
    seconds; *after* cleans up.
    """

    name: str
    item: str
    tables: tuple[str, ...]
    fill: Callable[[int], object]
    add: Callable[[int], object]
    churn: Callable[[int], object]
    work: Callable[[Settings], tuple[int, float]]
    after: Callable[[], object] = lambda: None
    most: int = 50_000
    """Maximum due records, so that a measurement takes seconds."""
    place: Callable[[Path], dict[str, Any]] = lambda _folder: {}
    """Function that creates places in the database's folder, and returns them as settings."""


def run(batch: str, settings: Settings) -> tuple[dict[str, Any], float]:
    """Execute a run of *batch* in this process; return its result and its seconds."""
    started = JobRun.start_here(batch, by=process_identity())
    assert started is not None, f"a run of {batch} is open"
    runner = Runner(settings, lambda _run, _child, keyed, **_options: EnqueueCounts(len(keyed)))
    began = monotonic()
    with runner.create_attempt(BATCHES[batch], started) as attempt:
        attempt.work_if_allowed()
    seconds = monotonic() - began
    runner.stop()
    assert attempt.state == "succeeded", attempt.error or attempt.held or attempt.blocked
    return attempt.result_fields(), seconds


def _work_statuses(settings: Settings) -> tuple[int, float]:
    result, seconds = run("user_status_cleanup", settings)
    return result["deleted"], seconds


def _fill_artifacts(count: int) -> None:
    database.execute_sql(ADD_STATISTICS)
    database.execute_sql(ADD_ARTIFACTS.format(when=FRESH), {"count": count})


def _work_artifacts(settings: Settings) -> tuple[int, float]:
    """Work on all buckets in turn until they are drained."""
    buckets = BucketSet(BUCKETS.name)
    client.delete(*buckets.keys)
    FeatureFlag.turn(FLAG, on=True)
    runner = Runner(settings, lambda *_sent: EnqueueCounts(0))
    buckets.tidy(client, MAX_BUCKETS, silent_for=settings.bucket_silent_after)
    destroyed, began = 0, monotonic()
    for number in range(MAX_BUCKETS):
        more = True
        while more:
            calls = [(f"delete_artifact_bucket:{number}", ())]
            (attempt,) = execute_message(runner, delete_artifact_bucket, calls, 1).ended
            assert attempt.error is None, attempt.error
            destroyed, more = destroyed + attempt.result_fields()["destroyed"], attempt.wants_successor
    seconds = monotonic() - began
    runner.stop()
    return destroyed, seconds


def _fill_uploads(count: int) -> None:
    _settle("kept/", count)
    known: int = client.zcard(UPLOAD_KEYS.pending)
    last = known + count
    for first in range(known + 1, last + 1, CHUNK):
        client.eval(REGISTER, 1, UPLOAD_KEYS.pending, first, min(first + CHUNK - 1, last), 0, "fresh")


def _settle(kind: str, count: int) -> None:
    database.execute_sql(ADD_SETTLED, {"kind": kind, "count": count})


def _churn_uploads(count: int) -> None:
    _settle("gone/", count)
    database.execute_sql("delete from settled_uploads where path like 'gone/%%'")


def _work_uploads(settings: Settings) -> tuple[int, float]:
    result, seconds = run("stale_direct_uploads", settings)
    return result["total_deleted_stale_entries"], seconds


def _store(folder: Path) -> dict[str, Any]:
    """Create an empty store, so that only our own cost is measured."""
    return {"object_stores": {LOCATION: SecretStr(f"file://{_adopted(folder / 'store')}")}}


def _adopted(folder: Path) -> Path:
    if not folder.exists():
        folder.mkdir(parents=True)
        Folder(folder).create_sentinel(Installation.ensure_id())
    return folder


def _fill_refs(count: int, projects: int) -> None:
    database.execute_sql(ADD_PROJECTS, {"count": count})
    database.execute_sql(ADD_REFS, {"count": count, "projects": projects})


def _churn_refs(count: int, projects: int) -> None:
    """Add *count* deletions, and delete as many of the oldest, which are each project's first."""
    table = "batched_git_ref_updates_deletions"
    database.execute_sql(ADD_REFS, {"count": count, "projects": projects})
    database.execute_sql(f"delete from {table} where id in (select id from {table} order by id limit {count})")


def _work_refs(settings: Settings) -> tuple[int, float]:
    result, seconds = run("git_ref_cleanup", settings)
    assert result["missing_repositories"] == 0, result
    return result["total_projects"], seconds


def _repositories(folder: Path, projects: int) -> dict[str, Any]:
    root = _adopted(folder / "repositories")
    for number in range(1, projects + 1):
        (root / "curve" / f"{number}.git").mkdir(parents=True, exist_ok=True)
    return {"repositories_root": root}


def _statement(text: str) -> Callable[[int], object]:
    """Return a function that executes *text* for a number of records."""
    return lambda count: database.execute_sql(text, {"count": count})


def _churned(add: str, delete: str) -> Callable[[int], None]:
    def churn(count: int) -> None:
        database.execute_sql(add, {"count": count})
        database.execute_sql(delete)

    return churn


def worlds(projects: int) -> tuple[World, ...]:
    """Return all worlds; *projects* have pending refs."""
    return (
        World(
            "statuses",
            "status",
            ("user_statuses",),
            fill=_statement(ADD_STATUSES.format(when=FRESH)),
            add=_statement(ADD_STATUSES.format(when=PAST)),
            churn=_churned(ADD_STATUSES.format(when=PAST), "delete from user_statuses where clear_status_at <= now()"),
            work=_work_statuses,
        ),
        World(
            "artifacts",
            "artifact",
            ("ci_job_artifacts",),
            fill=_fill_artifacts,
            add=_statement(ADD_ARTIFACTS.format(when=PAST)),
            churn=_churned(ADD_ARTIFACTS.format(when=PAST), "delete from ci_job_artifacts where expire_at < now()"),
            work=_work_artifacts,
            after=lambda: database.execute_sql("truncate deleted_objects"),
        ),
        World(
            "uploads",
            "upload",
            ("settled_uploads",),
            fill=_fill_uploads,
            add=lambda count: client.eval(REGISTER, 1, UPLOAD_KEYS.pending, 1, count, YESTERDAY, "due"),
            churn=_churn_uploads,
            work=_work_uploads,
            after=lambda: database.execute_sql("delete from settled_uploads where path like 'due/%%'"),
            place=_store,
            most=20_000,
        ),
        World(
            "refs",
            "project",
            ("batched_git_ref_updates_deletions", "projects"),
            fill=lambda count: _fill_refs(count, projects),
            add=lambda _count: None,
            churn=lambda count: _churn_refs(count, projects),
            work=_work_refs,
            place=lambda folder: _repositories(folder, projects),
        ),
    )
