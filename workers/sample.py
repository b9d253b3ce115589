"""Sample data for `forgekeeper seed`, made by the database itself so that millions take seconds."""

from __future__ import annotations

from collections.abc import Sequence

from forgekeeper.database import database

# Of ten artifacts six have expired; of the rest one is locked, one unknown, one a trace, one kept by its user.
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

PROJECTS = """
    insert into projects (id, disk_path)
    select first + n, format('sample/%%s.git', first + n)
    from (select coalesce(max(id), 0) + 1 as first from projects) as present, generate_series(0, %(total)s - 1) as n
    returning id, disk_path
"""
REF_DELETIONS = """
    insert into batched_git_ref_updates_deletions (project_id, ref)
    select project_id, ref from unnest(%(projects)s::bigint[]) as project_id, unnest(%(refs)s::text[]) as ref
"""


def artifacts(total: int) -> tuple[list[str], int]:
    """Add *total* job artifacts; return the paths of their objects, and how many may be destroyed."""
    paths = [row[0] for row in database.execute_sql(ARTIFACTS, {"total": total}).fetchall()]
    database.execute_sql(STATISTICS)
    return paths, sum(n % 10 < 6 for n in range(total))


def projects(total: int) -> dict[int, str]:
    """Add *total* projects; return where the repository of each belongs, by its id."""
    return dict(database.execute_sql(PROJECTS, {"total": total}).fetchall())


def ref_deletions(projects: Sequence[int], refs: Sequence[str]) -> int:
    """Ask for the deletion of *refs* in each of *projects*; return how many rows there are."""
    count: int = database.execute_sql(REF_DELETIONS, {"projects": list(projects), "refs": list(refs)}).rowcount
    return count
