"""An index of artifacts that are kept until the forge updates them; the exporter counts them."""

from forgekeeper.platform.migrations import sql

up = sql("""
create index ci_job_artifacts_waiting on ci_job_artifacts (expire_at)
    where (file_type <> 3 and locked = 0 and coalesce(file_final_path, '') = '' and coalesce(file, '') <> '')
        or (file_type <> 3 and coalesce(locked, 2) not in (0, 1));
""")
