"""Job artifacts, their objects, and the statistics of their projects.

Of ten artifacts six have expired; of the rest one is locked, one unknown, one a trace, one kept by its user.
"""

from __future__ import annotations

from collections.abc import Iterator

from demo.figures import Figure, Results, Sample, SampleData, processed
from forgekeeper.database import database, now
from forgekeeper.settings import Settings
from forgekeeper.storage import stores
from models import JobArtifact

ARTIFACTS = """
    insert into ci_job_artifacts
        (project_id, job_id, file_type, file, file_final_path, size, expire_at, locked)
    select 1 + n %% 7, n, case when n %% 10 = 8 then 3 else 1 end, 'artifacts.zip',
        format('%%s/%%s/sample-%%s-artifacts.zip', left(md5(n::text), 2), 1 + n %% 7, first + n), 100 + n %% 50,
        case when n %% 10 < 9 then clock_timestamp() - interval '1 hour' - n * interval '1 second' end,
        case n %% 10 when 6 then 1 when 7 then 2 else 0 end
    from (select coalesce(max(id), 0) + 1 as first from ci_job_artifacts) as present,
        generate_series(0, %(total)s - 1) as n
    returning file_final_path
"""
STATISTICS = """
    insert into project_statistics (project_id, build_artifacts_size)
    select project_id, sum(size) from ci_job_artifacts group by project_id
    on conflict (project_id) do update set build_artifacts_size = excluded.build_artifacts_size
"""


def add(scale: int, settings: Settings) -> Sample:
    """Add artifacts with their objects, but one: it never arrived."""
    total = 1_000 * scale
    paths, due = add_artifacts(total)
    store = stores.at(JobArtifact.location, settings)
    if store is not None:
        store.put(paths[1:])
    return Sample("job artifacts", total, due)


def count(_settings: Settings) -> Sample:
    due = JobArtifact.select().where(JobArtifact.is_expired(now())).count()
    return Sample("job artifacts", JobArtifact.select().count(), due, objects=max(0, due - 1))


def figures(before: Sample, _results: Results) -> Iterator[Figure]:
    yield processed("delete_artifact_bucket", "expired_artifact", before.due)
    # Also the object that never arrived.
    yield processed("delete_objects", "deleted_object", before.due)


def add_artifacts(total: int) -> tuple[list[str], int]:
    """Add *total* job artifacts; return the paths of their objects, and how many may be destroyed."""
    paths = [row[0] for row in database.execute_sql(ARTIFACTS, {"total": total}).fetchall()]
    database.execute_sql(STATISTICS)
    return paths, sum(n % 10 < 6 for n in range(total))


SAMPLE_DATA = SampleData(add, count, figures)
