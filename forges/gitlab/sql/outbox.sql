-- GitLab's outbox, for those who leave objects to it.
create or replace view VIEWS.ci_deleted_objects as
select id, file_store, store_dir, file, pick_up_at
    , project_id -- where there is ci_deleted_objects.project_id
    , null::bigint as project_id -- where there is no ci_deleted_objects.project_id
from TABLES.ci_deleted_objects;

-- A function, for the default of an id is taken with the caller's rights.
-- GitLab deletes each object of its outbox without asking again, so one that an artifact still names is left out.
create or replace function VIEWS.hand_over_object() returns trigger
    language plpgsql security definer set search_path = TABLES, pg_temp as $$
declare
    path constant text := pg_catalog.concat_ws('/', nullif(new.store_dir, ''), new.file);
begin
    if exists (select from VIEWS.ci_job_artifacts where file_final_path = path) then
        return null;
    end if;
    insert into TABLES.ci_deleted_objects (
        project_id, -- where there is ci_deleted_objects.project_id
        file_store, store_dir, file, pick_up_at
    ) values (
        new.project_id, -- where there is ci_deleted_objects.project_id
        new.file_store, new.store_dir, new.file, coalesce(new.pick_up_at, pg_catalog.now())
    );
    return new;
end
$$;
create or replace trigger hand_over instead of insert on VIEWS.ci_deleted_objects
    for each row execute function VIEWS.hand_over_object();
