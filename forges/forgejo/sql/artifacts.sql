-- Rows without an object are left out: their file is gone (4 and 6), or its upload has failed (3).  A pending one (1)
-- without a path has no object yet, and is given up after a day.
create or replace view VIEWS.ci_job_artifacts as
select id, repo_id as project_id, run_id as job_id, 0::bigint as partition_id, 1 as file_type, 2 as file_store,
    case when storage_path <> '' then artifact_name end as file, storage_path as file_final_path,
    case when file_compressed_size > 0 then file_compressed_size else file_size end as size, DUE as expire_at,
    LOCKED as locked, to_timestamp(created_unix) as created_at, to_timestamp(updated_unix) as updated_at,
    to_jsonb(artifact) as whole_row
from TABLES.action_artifact as artifact
where status in (1, 2, 5) or status = 3 and storage_path <> '';

-- Who locks a row needs the right to update it; nothing else is done with that right.
create or replace trigger refuse instead of update on VIEWS.ci_job_artifacts
    for each row execute function VIEWS.refuse_update();

-- A row stays and gets the status that Forgejo's own job gives it, unless it has changed since it was found: a run that
-- is repeated uploads into the row of the run before.
create or replace function VIEWS.expire_artifact() returns trigger
    language plpgsql security definer set search_path = TABLES, pg_temp as $$
declare
    found_as constant TABLES.action_artifact := pg_catalog.jsonb_populate_record(
        null::TABLES.action_artifact, old.whole_row
    );
begin
    if old.locked <> 0 or not old.expire_at < pg_catalog.now() then
        raise exception 'expired artifacts alone are deleted here' using errcode = 'with_check_option_violation';
    end if;
    update TABLES.action_artifact as artifact
    set status = case found_as.status when 1 then 3 when 2 then 4 else 6 end,
        updated_unix = pg_catalog.floor(extract(epoch from pg_catalog.now()))::bigint
    where artifact.id = found_as.id and artifact.status = found_as.status
        and artifact.storage_path = found_as.storage_path and artifact.expired_unix = found_as.expired_unix
        and artifact.updated_unix = found_as.updated_unix;
    return case when found then old end;
end
$$;
create or replace trigger expire instead of delete on VIEWS.ci_job_artifacts
    for each row execute function VIEWS.expire_artifact();

-- Rows that were marked as expired get the status and the time back that they had, each unless it has changed since.
create or replace function VIEWS.restore_artifacts(rows jsonb) returns bigint
    language plpgsql security definer set search_path = TABLES, pg_temp as $$
declare
    restored bigint;
begin
    update TABLES.action_artifact as artifact set status = was.status, updated_unix = was.updated_unix
    from pg_catalog.jsonb_array_elements(rows) as element (destroyed),
        pg_catalog.jsonb_populate_record(null::TABLES.action_artifact, element.destroyed->'whole_row') as was
    where artifact.id = was.id and artifact.storage_path = was.storage_path
        and artifact.expired_unix = was.expired_unix
        and artifact.status = case was.status when 1 then 3 when 2 then 4 else 6 end;
    get diagnostics restored = row_count;
    return restored;
end
$$;
revoke execute on function VIEWS.restore_artifacts(jsonb) from public;
