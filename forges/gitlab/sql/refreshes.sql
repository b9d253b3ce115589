-- Those whose statistics are being counted afresh; GitLab's own deletion spares them.
create or replace view VIEWS.project_build_artifacts_size_refreshes as
select id, project_id, state, created_at, updated_at from TABLES.project_build_artifacts_size_refreshes;
