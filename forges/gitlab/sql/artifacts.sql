-- The first columns are those of every forge; by the others a destroyed artifact can be restored.
-- By the parent: a partition shows a part of the artifacts, and an object that another part names would be deleted.
create or replace view VIEWS.ci_job_artifacts as
select id, project_id, job_id, partition_id, file_type, file_store, file,
    coalesce(
        nullif(file_final_path, ''),
        VIEWS.artifact_path(project_id, job_id, id, created_at, file, file_location, file_type)
    ) as file_final_path,
    size, expire_at, locked, created_at, updated_at OTHER_COLUMNS
from TABLES.ARTIFACTS as artifact;

-- Their objects are in folders with a number, where `delete_objects` leaves everything.
create or replace view VIEWS.ci_pathless_artifacts as
select id, job_id from TABLES.ARTIFACTS
where coalesce(file_final_path, '') = '' and file <> ''
    and VIEWS.artifact_path(project_id, job_id, id, created_at, file, file_location, file_type) = '';

-- Rows by the columns of the view become rows of the table again, each unless there is one with its id.
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
    select refresh.project_id into recounted
    from pg_catalog.jsonb_array_elements(rows) as element (one)
        join TABLES.project_build_artifacts_size_refreshes as refresh
            on refresh.project_id = (element.one->>'project_id')::bigint
    where refresh.state <> 1 limit 1;
    if recounted is not null then
        raise exception 'GitLab recounts the artifacts of project %: try again when it has done so', recounted
            using errcode = 'object_in_use';
    end if;
    for destroyed in select element.one from pg_catalog.jsonb_array_elements(rows) as element (one) loop
        if not destroyed ? 'stored_path' then
            raise exception 'an earlier version destroyed artifact %, and did not record all of its columns',
                destroyed->>'id' using errcode = 'not_null_violation', hint = 'Insert its row yourself.';
        end if;
        artifact := pg_catalog.jsonb_populate_record(
            null::TABLES.ARTIFACTS,
            destroyed || pg_catalog.jsonb_build_object('file_final_path', destroyed->'stored_path')
        );
        continue when exists (select from TABLES.ARTIFACTS as there where there.id = artifact.id);
        insert into TABLES.ARTIFACTS overriding system value values (artifact.*) returning id into given;
        if given <> artifact.id then
            update TABLES.ARTIFACTS as back set id = artifact.id
            where back.id = given and back.job_id = artifact.job_id and back.file_type = artifact.file_type;
        end if; RESTORE_FOLLOWERS
        update TABLES.project_statistics as kept
        set build_artifacts_size = kept.build_artifacts_size + coalesce(artifact.size, 0),
            storage_size = kept.storage_size + coalesce(artifact.size, 0)
        where kept.project_id = artifact.project_id;
        restored := restored + 1;
    end loop;
    return restored;
end
$$;
revoke execute on function VIEWS.restore_artifacts(jsonb) from public;
