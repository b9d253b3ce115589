create or replace view VIEWS.project_statistics as
select project_id, build_artifacts_size, storage_size from TABLES.project_statistics;

-- By the difference: this function is not given the row as it is once others have let go of it.
create or replace function VIEWS.change_statistics() returns trigger
    language plpgsql security definer set search_path = TABLES, pg_temp as $$
begin
    update TABLES.project_statistics as kept
    set build_artifacts_size = kept.build_artifacts_size + new.build_artifacts_size - old.build_artifacts_size,
        storage_size = kept.storage_size + new.build_artifacts_size - old.build_artifacts_size
    where kept.project_id = old.project_id
    returning kept.build_artifacts_size, kept.storage_size into new.build_artifacts_size, new.storage_size;
    return case when found then new end;
end
$$;
create or replace trigger change instead of update on VIEWS.project_statistics
    for each row execute function VIEWS.change_statistics();

-- Those whose statistics are being counted afresh; GitLab's own deletion spares them.
create or replace view VIEWS.project_build_artifacts_size_refreshes as
select id, project_id, state, created_at, updated_at from TABLES.project_build_artifacts_size_refreshes;
