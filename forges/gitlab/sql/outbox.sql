-- GitLab's outbox, for those who leave objects to it.
create or replace view VIEWS.ci_deleted_objects as
select id, file_store, store_dir, file, pick_up_at
    , project_id -- where there is ci_deleted_objects.project_id
from TABLES.ci_deleted_objects;

-- A function, for the default of an id is taken with the caller's rights.
create or replace function VIEWS.hand_over_object() returns trigger
    language plpgsql security definer set search_path = TABLES, pg_temp as $$
begin
    insert into TABLES.ci_deleted_objects (
        project_id, -- where there is ci_deleted_objects.project_id
        file_store, store_dir, file, pick_up_at
    ) values (
        new.project_id, -- where there is ci_deleted_objects.project_id
        new.file_store, new.store_dir, new.file, coalesce(new.pick_up_at, now())
    );
    return new;
end
$$;
create or replace trigger hand_over instead of insert on VIEWS.ci_deleted_objects
    for each row execute function VIEWS.hand_over_object();
