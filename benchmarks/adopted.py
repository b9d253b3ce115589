"""Expired artifacts among a million in GitLab's partitioned table: the cost of destroying them through views.

Ours is the document's child through the views that `forgekeeper adopt gitlab` creates: a computed path, and statistics
that a rule updates. The peer is the same child on a partitioned table with equal columns and indexes, without view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic

from benchmarks.artifacts import ARTIFACTS, DUE, PROJECTS
from benchmarks.audit import work_off
from benchmarks.contest import Benchmark, Peer
from benchmarks.forge import database_of
from demo.servers import Servers
from forgekeeper.api.batches import FeatureFlag
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database
from forgekeeper.platform.settings import Settings
from forges.adoption import plan_adoption
from forges.gitlab.adoption import ADOPTION_CLASS
from models import CLASS_EXPRESSION, TRACE_FILE_TYPE, UNLOCKED_STATE
from workers.expired_job_artifacts import FLAG

TABLES, VIEWS, DIRECT = "gitlab", "forgekeeper_gitlab", "direct"
SQL = Path(__file__).parents[1] / "tests" / "harness" / "gitlab_tables.sql"
"""GitLab's tables, as in the tests."""
PARTED = f"""
    create schema {DIRECT};
    create table {DIRECT}.ci_job_artifacts (like {TABLES}.p_ci_job_artifacts including all)
        partition by list (partition_id);
    create table {DIRECT}.first partition of {DIRECT}.ci_job_artifacts for values in (100, 101);
    create table {DIRECT}.second partition of {DIRECT}.ci_job_artifacts for values in (102);
    create index on {DIRECT}.ci_job_artifacts ({CLASS_EXPRESSION}, expire_at, id)
        where locked = {UNLOCKED_STATE} and file_type <> {TRACE_FILE_TYPE};
    create table {DIRECT}.project_statistics (like {TABLES}.project_statistics including all);
    create table {DIRECT}.project_build_artifacts_size_refreshes
        (like {TABLES}.project_build_artifacts_size_refreshes including all);
    create table {DIRECT}.project_groups (project_id bigint, group_id bigint, primary key (project_id, group_id))
"""
ADD = """
    insert into {table} (id, project_id, job_id, partition_id, file_type, file_store, file, file_final_path,
        file_location, size, expire_at, locked, created_at, updated_at)
    select number, 1 + mod(hash, %(projects)s), number / 3, 100 + mod(number, 3),
        case when mod(number, 11) = 0 then 3 else 1 + mod(number, 2) end, 2, 'artifacts.zip',
        left(path, 2) || '/' || path || '/@final/' || path, 2, mod(hash, 1000003),
        case when mod(number, 5) < 2 then now() - mod(hash, 2592000) * interval '1 s'
             when mod(number, 5) < 4 then now() + interval '1 day' end,
        case when mod(number, 17) < 2 then mod(number, 17) + 1 else 0 end, now() - number * interval '2.3 ms', now()
    from (select number, md5(number::text) as path, abs(hashint8(number)::bigint) as hash
          from generate_series(1, %(artifacts)s) as number) as made
"""
ADD_STATISTICS = """
    insert into {statistics} (project_id, namespace_id, build_artifacts_size, storage_size)
    select project_id, 1, 1000 + sum(size), 1500 + sum(size) from {table} group by project_id
"""
FLAGS = f"""
    insert into {TABLES}.features (key) values ('{FLAG}');
    insert into {TABLES}.feature_gates (feature_key, key, value) values ('{FLAG}', 'boolean', 'true')
"""


def benchmarks(servers: Servers, scale: float) -> list[Benchmark]:
    """Return the benchmarks of *scale* times 1,000,000 artifacts."""
    measured = partial(_destroyed, servers, round(ARTIFACTS * scale), iter(range(1, 1_000_000)).__next__)
    tables = Peer("the tables themselves", partial(measured, DIRECT), 0.95)
    return [Benchmark("artifacts_views", "artifacts/s", partial(measured, VIEWS), (tables,))]


def _destroyed(servers: Servers, artifacts: int, number: Callable[[], int], forge: str) -> float:
    """Destroy the expired artifacts in this process, bucket by bucket; return the rate."""
    with _artifacts(servers, artifacts, forge) as (settings, due):
        began = monotonic()
        destroyed = work_off(settings, number())
        seconds = monotonic() - began
        assert destroyed == due, f"{destroyed} of {due} were destroyed"
    return due / seconds


@contextmanager
def _artifacts(servers: Servers, artifacts: int, forge: str) -> Iterator[tuple[Settings, int]]:
    """Connect to a database with *artifacts*; yield its settings and the number due."""
    schema, name = (TABLES, "p_ci_job_artifacts") if forge == VIEWS else (DIRECT, "ci_job_artifacts")
    table, statistics = f"{schema}.{name}", f"{schema}.project_statistics"
    make = partial(_make, forge)
    with database_of(servers, f"artifacts_{forge}", make=make, breaker_share=1, forge_schema=forge) as settings:
        database.execute_sql(f"truncate {table}, {statistics}, deleted_objects")
        database.execute_sql(ADD.format(table=table), {"projects": PROJECTS, "artifacts": artifacts})
        database.execute_sql(ADD_STATISTICS.format(table=table, statistics=statistics))
        for command in (f"vacuum analyze {table}, {statistics}", "checkpoint"):
            database.execute_sql(command)
        client.flushdb()
        yield settings, database.execute_sql(f"select count(*) from {table} where {DUE}").fetchone()[0]


def _make(forge: str, _database: object) -> None:
    database.execute_sql(f"create schema {TABLES}; set local search_path = {TABLES}; {SQL.read_text(encoding='utf-8')}")
    # GitLab's foreign keys and triggers cost the same with and without views.
    database.execute_sql(f"""
        drop table {TABLES}.p_ci_build_trace_metadata;
        drop table {TABLES}.ci_job_artifact_states, {TABLES}.p_ci_job_artifact_reports;
        drop trigger assign_p_ci_job_artifacts_id on {TABLES}.p_ci_job_artifacts
    """)
    if forge == DIRECT:
        database.execute_sql(PARTED)
        FeatureFlag.turn(FLAG, on=True)
    else:
        database.execute_sql(FLAGS)
        found = plan_adoption(ADOPTION_CLASS, TABLES, VIEWS, None)
        database.execute_sql("\n".join(found.write_statements()).replace("%", "%%"))
        for statement in found.find_missing_indexes():
            database.execute_sql(statement)
