"""Sample data for `forgekeeper seed`, made by the database itself so that millions take seconds."""

from __future__ import annotations

from collections.abc import Sequence

from forgekeeper.database import database

# Of five statuses two have expired, two expire later, one never does.
USER_STATUSES = """
    insert into user_statuses (user_id, emoji, message, clear_status_at)
    select first + n, 'palm_tree', 'Away, sample ' || n,
        case when n %% 5 < 2 then clock_timestamp() - n * interval '1 second'
             when n %% 5 < 4 then clock_timestamp() + interval '1 day' end
    from (select coalesce(max(user_id), 0) + 1 as first from user_statuses) as present,
        generate_series(0, %(total)s - 1) as n
"""
# Of five imports one has stalled, with two entities of four trackers each; the others are fresh or done.
IMPORTS = """
    with made as (
        insert into bulk_imports (user_id, status, updated_at)
        select n, case when n %% 5 = 4 then 2 else n %% 2 end,
            clock_timestamp() - case when n %% 5 in (0, 4) then interval '2 days' else interval '1 hour' end
        from generate_series(0, %(total)s - 1) as n
        returning id, status, updated_at
    ), entities as (
        insert into bulk_import_entities
            (bulk_import_id, source_full_path, destination_name, destination_namespace, status, updated_at)
        select id, 'group/sample-' || id, 'sample-' || which, 'imported', status, updated_at
        from made, generate_series(1, 2) as which
        returning id, status, updated_at
    )
    insert into bulk_import_trackers (bulk_import_entity_id, relation, status, updated_at)
    select id, 'relation-' || stage, case when status = 2 then 2 else (array[0, 1, 3, 2])[stage] end, updated_at
    from entities, generate_series(1, 4) as stage
"""
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


def user_statuses(total: int) -> int:
    """Add *total* statuses; return how many of them are due."""
    database.execute_sql(USER_STATUSES, {"total": total})
    return sum(n % 5 < 2 for n in range(total))


def imports(total: int) -> int:
    """Add *total* bulk imports with entities and trackers; return how many have stalled."""
    database.execute_sql(IMPORTS, {"total": total})
    return sum(n % 5 == 0 for n in range(total))


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
