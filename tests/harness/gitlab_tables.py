"""GitLab's tables, filled with records of every kind, and the ids of the due records.

Queries of its own find the due records in the tables: they use neither the views nor the batches.
"""

from pathlib import Path
from typing import NamedTuple

TABLES, PARTITIONS = "gitlab", "gitlab_partitions_dynamic"
SQL = Path(__file__).with_suffix(".sql")
PROJECTS = 50

# Three projects have a recount of their statistics; one of the recounts has not begun.  The last two projects have no row
# in project_repositories: one has hashed storage, and only GitLab knows the place of the other.  The project before them
# is on another storage.
ADD_PROJECTS = """
    insert into shards values (1, 'default'), (2, 'nfs2');
    insert into namespaces (id, path, parent_id, traversal_ids)
    values (1, 'outer', null, array[1]), (2, 'inner', 1, array[1, 2]);
    insert into projects (id, path, namespace_id, repository_storage, storage_version)
    select id, 'p' || id, 1 + mod(id, 2), case id when {projects} - 2 then 'nfs2' else 'default' end,
        case id when {projects} then null else 2 end
    from generate_series(1, {projects}) as id;
    insert into project_repositories (shard_id, disk_path, project_id)
    select case id when {projects} - 2 then 2 else 1 end, '@hashed/of/project/' || id, id
    from generate_series(1, {projects} - 2) as id;
    insert into project_build_artifacts_size_refreshes (project_id, state) values (5, 1), (6, 2), (7, 3);
"""
# Each property has its own period, so all combinations occur.
ADD_ARTIFACTS = """
    insert into p_ci_job_artifacts (
        project_id, job_id, partition_id, file_type, file_store, file, file_final_path, file_location, size, expire_at,
        locked, created_at, updated_at
    )
    select 1 + mod(i, {projects}), 1000 + i, 100 + mod(i, 3), case when mod(i, 11) = 0 then 3 else 1 + mod(i, 2) end,
        1 + mod(i / 3, 2), case when mod(i, 19) > 0 then 'artifacts.zip' end,
        case when mod(i, 4) > 0 then 'aa/bb/cc/@final/' || i when mod(i, 8) = 0 then '' end, (array[2, 1, null, 2, 9])[1 + mod(i / 4, 5)],
        case when mod(i, 17) > 0 then mod(i * 7919::bigint, 10007) end,
        case mod(i, 6) when 0 then now() + interval '1 day' when 1 then null
            else now() - interval '30 days' + i * interval '1 millisecond' end,
        (array[0, 0, 0, 0, 1, 2, null])[1 + mod(i, 7)], now() - interval '40 days' - i * interval '1 hour', now()
    from generate_series(1, {artifacts}) as i
"""
ADD_STATISTICS = """
    insert into project_statistics (project_id, namespace_id, repository_size, build_artifacts_size, storage_size)
    select id, namespace_id, 500, 1000 + sizes, 1500 + sizes
    from projects, lateral (
        select coalesce(sum(size), 0) as sizes from p_ci_job_artifacts where project_id = projects.id
    ) as artifacts
"""
ADD_STATUSES = """
    insert into user_statuses (user_id, message, clear_status_at)
    select i, 'away', case mod(i, 4) when 0 then null when 1 then now() + interval '1 day'
        else now() - interval '1 day' + i * interval '1 millisecond' end
    from generate_series(1, {statuses}) as i
"""
ADD_IMPORTS = """
    insert into bulk_imports (user_id, source_type, status, created_at, updated_at, has_failures)
    select i, 0, (array[0, 1, 2, 3, -1, -2])[1 + mod(i, 6)], now(),
        now() - case when mod(i, 5) > 0 then interval '3 days' else interval '1 hour' end + i * interval '1 millisecond',
        case when mod(i, 7) > 0 then false end
    from generate_series(1, {imports}) as i;
    insert into bulk_import_entities (
        bulk_import_id, project_id, namespace_id, organization_id, source_type, source_full_path, destination_name,
        destination_namespace, status, created_at, updated_at, has_failures
    )
    select i, case mod(i, 3) when 0 then i end, case mod(i, 3) when 1 then i end, case mod(i, 3) when 2 then 1 end, 1,
        'group/' || i, 'name', 'space', (array[1, 2, 0, 3, -1, -2, 1])[1 + mod(i, 7)], now(),
        now() - case when mod(i, 4) > 0 then interval '3 days' else interval '1 hour' end + i * interval '1 millisecond',
        case when mod(i, 2) > 0 then false end
    from generate_series(1, {imports}) as i;
    insert into bulk_import_trackers (bulk_import_entity_id, relation, stage, status, created_at, updated_at)
    select i, 'relation', stage, (array[0, 1, 2, 3, 4, -1, -2, -3])[1 + mod(i + stage, 8)], now(), now()
    from generate_series(1, {imports}) as i, generate_series(0, 2) as stage;
    insert into bulk_import_failures (bulk_import_entity_id)
    select i from generate_series(1, {imports}) as i where mod(i, 9) = 0
"""
ADD_DELETIONS = """
    insert into p_batched_git_ref_updates_deletions (project_id, partition_id, ref, status, created_at, updated_at)
    select 1 + mod(i, {projects} + 1), 1 + mod(i, 2), 'refs/mr/' || i, case when mod(i, 5) > 0 then 1 else 2 end,
        now() - interval '3 days', now() - interval '3 days'
    from generate_series(1, {deletions}) as i
"""
DUE = {
    "artifacts": """
        select id from p_ci_job_artifacts
        where expire_at < now() and locked = 0 and file_type <> 3
            and (file_final_path <> '' or file is null or file_location is null or file_location in (1, 2))
            and project_id not in (6, 7)
    """,
    "pathless": """
        select id from p_ci_job_artifacts
        where expire_at < now() and locked = 0 and file_type <> 3
            and coalesce(file_final_path, '') = '' and file is not null and file_location not in (1, 2)
    """,
    "statuses": "select user_id from user_statuses where clear_status_at < now()",
    "imports": "select id from bulk_imports where status in (0, 1) and updated_at < now() - interval '24 hours'",
    "entities": """
        select id from bulk_import_entities where status in (0, 1) and updated_at < now() - interval '24 hours'
    """,
    "trackers": """
        select tracker.id
        from bulk_import_trackers as tracker join bulk_import_entities as entity on entity.id = bulk_import_entity_id
        where entity.status in (0, 1) and entity.updated_at < now() - interval '24 hours' and tracker.status in (0, 1, 3)
    """,
    "refs": """
        select id from p_batched_git_ref_updates_deletions
        where status = 1 and project_id not in ({projects} - 2, {projects})
    """,
}
STATISTICS = """
    select project_id, build_artifacts_size, storage_size from project_statistics order by project_id
"""
LEFT_OVER = """
    select projects.id, 1000 + coalesce(sum(size), 0), 1500 + coalesce(sum(size), 0)
    from projects left join p_ci_job_artifacts as artifact on project_id = projects.id {without}
    group by projects.id order by projects.id
"""


class DueIds(NamedTuple):
    """Ids of due records; *pathless* artifacts would be due if the place of their objects were known."""

    artifacts: set[int]
    pathless: set[int]
    statuses: set[int]
    imports: set[int]
    entities: set[int]
    trackers: set[int]
    refs: set[int]


def build(cursor):
    """Create the empty tables in a schema of their own, and set the session's search_path to it."""
    cursor.execute(f"create schema {TABLES}; set search_path = {TABLES}; {SQL.read_text()}")


def remove(cursor):
    """Drop the tables and all views of them."""
    cursor.execute(f"drop schema if exists {TABLES} cascade; drop schema if exists {PARTITIONS} cascade")


def fill(cursor, *, artifacts=0, statuses=0, imports=0, deletions=0):
    """Fill the tables with records of every kind, in the given numbers."""
    counts = {"artifacts": artifacts, "statuses": statuses, "imports": imports, "deletions": deletions}
    parts = (ADD_PROJECTS, ADD_ARTIFACTS, ADD_STATISTICS, ADD_STATUSES, ADD_IMPORTS, ADD_DELETIONS)
    for statement in parts:
        cursor.execute(statement.format(projects=PROJECTS, **counts))
    cursor.execute("analyze")


def find_due(cursor):
    """Return the ids of the due records; all others must be kept."""
    return DueIds(**{name: ids(cursor, query.format(projects=PROJECTS)) for name, query in DUE.items()})


def ids(cursor, query):
    """Return the only column of a query as a set."""
    return {number for (number,) in rows(cursor, query)}


def rows(cursor, query, values=None):
    """Return the rows of a query."""
    cursor.execute(query, values)
    return cursor.fetchall()


def statistics(cursor):
    """Return the statistics of the projects."""
    return rows(cursor, STATISTICS)


def left_over(cursor, *, without=()):
    """Compute the expected statistics from the remaining artifacts, *without* the artifacts with these ids."""
    cursor.execute(LEFT_OVER.format(without="and artifact.id <> all(%s)"), (list(without),))
    return cursor.fetchall()
