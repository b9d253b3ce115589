-- From all columns as they are stored, and the rows that PostgreSQL deletes with it, a destroyed artifact can be restored.
-- By its place a row is found again without an index.
-- By the parent: a partition shows a part of the artifacts, and an object that another part names would be deleted.
create or replace view VIEWS.ci_job_artifacts as
select id, project_id, job_id,
    partition_id, -- where there is ARTIFACTS.partition_id
    0::bigint as partition_id, -- where there is no ARTIFACTS.partition_id
    file_type, file_store, file,
    coalesce(nullif(file_final_path, ''), PATH_OF_ROW) as file_final_path,
    size, INSTANT(expire_at) as expire_at, locked, INSTANT(created_at) as created_at, INSTANT(updated_at) as updated_at,
    file_location, OTHER_COLUMNS AS_STORED as as_stored, tableoid, ctid FOLLOWERS
from TABLES.ARTIFACTS as artifact;

-- Their objects are in folders with a number, where `delete_objects` leaves everything.
create or replace view VIEWS.ci_pathless_artifacts as
select id, job_id from TABLES.ARTIFACTS
where coalesce(file_final_path, '') = '' and file <> ''
    and PATH_OF_ROW = '';

-- Rows of the view become rows of the table again, each unless there is one with its id.
-- GitLab's trigger gives a new row a new id, and warns of each that it did not give: so the row gets its old one after.
create or replace function VIEWS.restore_artifacts(rows jsonb) returns bigint
    language plpgsql security definer set search_path = TABLES, pg_temp set client_min_messages = error as $$
declare
    destroyed jsonb;
    artifact TABLES.ARTIFACTS;
    given bigint;
    restored bigint := 0;
    recounted bigint;
begin
    if pg_catalog.to_regclass('TABLES.project_build_artifacts_size_refreshes') is not null then
        select refresh.project_id into recounted
        from pg_catalog.jsonb_array_elements(rows) as element (one)
            join TABLES.project_build_artifacts_size_refreshes as refresh
                on refresh.project_id = (element.one->>'project_id')::bigint
        where refresh.state <> 1 limit 1;
    end if;
    if recounted is not null then
        raise exception 'GitLab recounts the artifacts of project %: try again when it has done so', recounted
            using errcode = 'object_in_use';
    end if;
    for destroyed in select element.one from pg_catalog.jsonb_array_elements(rows) as element (one) loop
        if not destroyed ? 'as_stored' then
            raise exception 'an earlier version destroyed artifact %, and did not record all of its columns',
                destroyed->>'id' using errcode = 'not_null_violation', hint = 'Insert its row yourself.';
        end if;
        artifact := pg_catalog.jsonb_populate_record(
            null::TABLES.ARTIFACTS, destroyed || coalesce(nullif(destroyed->'as_stored', 'null'), '{}')
        );
        continue when exists (select from TABLES.ARTIFACTS as there where there.id = artifact.id);
        insert into TABLES.ARTIFACTS overriding system value values (artifact.*) returning id into given;
        if given <> artifact.id then
            update TABLES.ARTIFACTS as back set id = artifact.id
            where back.id = given and back.job_id = artifact.job_id and back.file_type = artifact.file_type;
        end if; RESTORE_FOLLOWERS
        if pg_catalog.to_regclass('TABLES.project_statistics') is not null then
            update TABLES.project_statistics as kept
            set build_artifacts_size = kept.build_artifacts_size + coalesce(artifact.size, 0),
                storage_size = kept.storage_size + coalesce(artifact.size, 0)
            where kept.project_id = artifact.project_id;
        end if;
        restored := restored + 1;
    end loop;
    return restored;
end
$$;
revoke execute on function VIEWS.restore_artifacts(jsonb) from public;

-- Who locks a row needs the right to update it; nothing else is done with that right.
create or replace trigger refuse instead of update on VIEWS.ci_job_artifacts
    for each row execute function VIEWS.refuse_update();
