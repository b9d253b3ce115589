-- A job's artifacts are locked as its pipeline is.
create or replace view VIEWS.ci_job_locks as
select build.id as job_id, pipeline.locked
from TABLES.ci_builds as build join TABLES.ci_pipelines as pipeline on pipeline.id = build.commit_id;
