-- Changed by functions with the rights and the search_path of the tables' owner, for GitLab's own triggers run with
-- those of the caller: they read the tables that they name without a schema.
-- Each guards the status that the statement has seen: unlike an update of a table, a function is given no second look
-- at a row that changed in the meantime.
-- Each makes the changes of the design document alone: an unfinished record that nothing has touched for a day times out.
create or replace view VIEWS.bulk_imports as
select id, user_id, source_type, status,
    coalesce(has_failures, false) as has_failures, -- where there is bulk_imports.has_failures
    false as has_failures, -- where there is no bulk_imports.has_failures
    created_at, updated_at
from TABLES.bulk_imports;

create or replace function VIEWS.change_bulk_import() returns trigger
    language plpgsql security definer set search_path = TABLES, pg_temp as $$
begin
    if not (old.status in (0, 1) and new.status = 3 and old.updated_at < pg_catalog.now() - interval '24 hours') then
        raise exception 'stale imports alone are changed here, from created or started to timeout'
            using errcode = 'with_check_option_violation';
    end if;
    update TABLES.bulk_imports as import
    set has_failures = new.has_failures or import.has_failures is true, -- where there is bulk_imports.has_failures
    set -- where there is no bulk_imports.has_failures
        status = new.status, updated_at = new.updated_at
    where import.id = old.id and import.status = old.status and import.updated_at = old.updated_at;
    return case when found then new end;
end
$$;
create or replace trigger change instead of update on VIEWS.bulk_imports
    for each row execute function VIEWS.change_bulk_import();

create or replace view VIEWS.bulk_import_entities as
select id, bulk_import_id, parent_id, source_type, source_full_path, destination_name, destination_namespace, status,
    coalesce(has_failures, false) or -- where there is bulk_import_entities.has_failures
    exists (
        select from TABLES.bulk_import_failures as failure where failure.bulk_import_entity_id = entity.id
    ) as has_failures,
    created_at, updated_at
from TABLES.bulk_import_entities as entity;

-- As GitLab does, an entity that has a failure marks its import, too.
create or replace function VIEWS.change_bulk_import_entity() returns trigger
    language plpgsql security definer set search_path = TABLES, pg_temp as $$
begin
    if not (old.status in (0, 1) and new.status = 3 and old.updated_at < pg_catalog.now() - interval '24 hours') then
        raise exception 'stale entities alone are changed here, from created or started to timeout'
            using errcode = 'with_check_option_violation';
    end if;
    update TABLES.bulk_import_entities as entity
    set has_failures = new.has_failures, -- where there is bulk_import_entities.has_failures
    set -- where there is no bulk_import_entities.has_failures
        status = new.status, updated_at = new.updated_at
    where entity.id = old.id and entity.status = old.status and entity.updated_at = old.updated_at;
    if not found then
        return null;
    end if;
    update TABLES.bulk_imports as import set has_failures = true -- where there is bulk_imports.has_failures
    where import.id = old.bulk_import_id and new.has_failures and import.has_failures is not true; -- where there is bulk_imports.has_failures
    return new;
end
$$;
create or replace trigger change instead of update on VIEWS.bulk_import_entities
    for each row execute function VIEWS.change_bulk_import_entity();

create or replace view VIEWS.bulk_import_trackers as
select id, bulk_import_entity_id, relation, stage, status, created_at,
    -- In GitLab it may be missing, and no statement expects that.
    coalesce(updated_at, created_at, to_timestamp(0)) as updated_at
from TABLES.bulk_import_trackers;

create or replace function VIEWS.change_bulk_import_tracker() returns trigger
    language plpgsql security definer set search_path = TABLES, pg_temp as $$
begin
    if not (old.status in (0, 1, 3) and new.status = 4) then
        raise exception 'unfinished trackers alone are changed here, to timeout'
            using errcode = 'with_check_option_violation';
    end if;
    update TABLES.bulk_import_trackers as tracker set status = new.status, updated_at = new.updated_at
    where tracker.id = old.id and tracker.status = old.status;
    return case when found then new end;
end
$$;
create or replace trigger change instead of update on VIEWS.bulk_import_trackers
    for each row execute function VIEWS.change_bulk_import_tracker();
