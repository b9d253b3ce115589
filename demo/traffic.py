"""New sample data that becomes due within the next minute, as on a forge that people use."""

from __future__ import annotations

import secrets
from pathlib import Path

import obstore

from demo.sample_data import add_ref_deletions, create_refs
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.register.keys import RegisterKeys
from forgekeeper.targets import stores
from models import JobArtifact
from workers.stale_direct_uploads import UPLOADS_REGISTER

TRAFFIC_INTERVAL_SECONDS = 60.0
"""Seconds between two calls of `add_traffic`."""
PROJECTS_PER_MINUTE, REFS_PER_PROJECT, UPLOADS_PER_MINUTE = 2, 20, 10
"""Projects, refs per project, and uploads that each call adds."""
STALE_UPLOAD_SECONDS = 3 * 3600 + 60
INSERT_EXPIRING_STATUSES = """
    insert into user_statuses (user_id, emoji, message, clear_status_at)
    select first + n, 'coffee', 'Back soon, sample ' || n, clock_timestamp() + random() * interval '1 minute'
    from (select coalesce(max(user_id), 0) + 1 as first from user_statuses) as present, generate_series(0, 99) as n
"""
INSERT_EXPIRING_ARTIFACTS = """
    with added as (
        insert into ci_job_artifacts (project_id, job_id, file_type, file, file_final_path, size, expire_at, locked)
        select 1 + n % 7, first + n, 1, 'artifacts.zip', format('%s/traffic-%s.zip', left(md5(n::text), 2), first + n),
            100000 + floor(random() * 900000)::bigint, clock_timestamp() + random() * interval '1 minute', 0
        from (select coalesce(max(id), 0) + 1 as first from ci_job_artifacts) as present, generate_series(0, 49) as n
        returning project_id, size, file_final_path
    ), counted as (
        insert into project_statistics (project_id, build_artifacts_size)
        select project_id, sum(size) from added group by project_id
        on conflict (project_id) do update
            set build_artifacts_size = project_statistics.build_artifacts_size + excluded.build_artifacts_size
    )
    select file_final_path from added
"""
SELECT_SAMPLE_PROJECTS = "select id, disk_path from projects where disk_path like 'sample/%' order by random()"


def add_traffic(settings: Settings) -> None:
    """Add statuses, artifacts, ref deletions and stale uploads; needs a connection."""
    database.execute_sql(INSERT_EXPIRING_STATUSES.replace("%", "%%"))
    paths = [path for (path,) in database.execute_sql(INSERT_EXPIRING_ARTIFACTS.replace("%", "%%")).fetchall()]
    uploads = [f"uploads/{secrets.token_hex(8)}" for _ in range(UPLOADS_PER_MINUTE)]
    store = stores.for_location(JobArtifact.location, settings)
    if store is not None:
        for path in (*paths, *uploads):
            obstore.put(store.store, path, b"a sample\n")
    began = client.time()[0] - STALE_UPLOAD_SECONDS
    client.zadd(
        RegisterKeys.for_register(UPLOADS_REGISTER.name).pending,
        dict.fromkeys((f"{JobArtifact.location}:{name}" for name in uploads), began),
    )
    if settings.repositories_root is not None:
        _request_ref_deletions(settings.repositories_root)


def _request_ref_deletions(root: Path) -> None:
    projects = database.execute_sql(SELECT_SAMPLE_PROJECTS.replace("%", "%%")).fetchall()
    # The sample of `demo` has a project whose repository was never created.
    there = [(project, path) for project, path in projects if (root / path).exists()]
    for project, path in there[:PROJECTS_PER_MINUTE]:
        refs = [f"refs/merge-requests/{secrets.token_hex(4)}/head" for _ in range(REFS_PER_PROJECT)]
        create_refs(root / path, refs)
        add_ref_deletions([project], refs)
