-- By the parent: a partition shows a part of the artifacts, and an object that another part names would be deleted.
create or replace view VIEWS.ci_job_artifacts as
select id, project_id, job_id, partition_id, file_type, file_store, file,
    coalesce(
        nullif(file_final_path, ''),
        VIEWS.artifact_path(project_id, job_id, id, created_at, file, file_location, file_type)
    ) as file_final_path,
    size, expire_at, locked, created_at, updated_at
from TABLES.ARTIFACTS;
