-- For tests that insert rows by the models: triggers insert the rows of a view into GitLab's table.
-- forgekeeper itself inserts nothing there, and lacks the right to do so.

alter table gitlab.p_ci_job_artifacts disable trigger assign_p_ci_job_artifacts_id;
drop index gitlab.p_ci_job_artifacts_job_id_file_type_partition_id_idx;
alter table gitlab.bulk_import_entities drop constraint bulk_import_entities_bulk_import_id_fkey;
alter table gitlab.bulk_import_trackers drop constraint bulk_import_trackers_bulk_import_entity_id_fkey;
alter table gitlab.p_batched_git_ref_updates_deletions
    drop constraint p_batched_git_ref_updates_deletions_ref_check;
-- Tests use forgekeeper's own flags.
drop view forge_flags;
drop trigger user_statuses_loose_fk_trigger on gitlab.user_statuses;

alter view user_statuses alter emoji set default 'speech_balloon';
alter view user_statuses alter availability set default 0;

create function insert_artifact() returns trigger language plpgsql set search_path = gitlab, forgekeeper_gitlab as $$
begin
    -- A location that GitLab does not know, so that the view shows only the path of the test and computes none.
    insert into gitlab.p_ci_job_artifacts (
        id, project_id, job_id, partition_id, file_type, file_store, file, file_final_path, file_location, size,
        expire_at, locked, created_at, updated_at
    ) values (
        new.id, new.project_id, new.job_id, new.partition_id, new.file_type, new.file_store, new.file,
        new.file_final_path, 9, new.size, new.expire_at, new.locked, new.created_at, new.updated_at
    );
    return new;
end
$$;
create trigger insert_row instead of insert on ci_job_artifacts for each row execute function insert_artifact();
alter view ci_job_artifacts alter id set default nextval('gitlab.ci_job_artifacts_id_seq');
alter view ci_job_artifacts alter partition_id set default 100;
alter view ci_job_artifacts alter file_store set default 1;
alter view ci_job_artifacts alter locked set default 2;
alter view ci_job_artifacts alter created_at set default now();
alter view ci_job_artifacts alter updated_at set default now();

create function insert_statistics() returns trigger language plpgsql set search_path = gitlab, forgekeeper_gitlab as $$
begin
    insert into gitlab.project_statistics (project_id, namespace_id, build_artifacts_size, storage_size)
    values (new.project_id, 1, new.build_artifacts_size, new.build_artifacts_size);
    return new;
end
$$;
create trigger insert_row instead of insert on project_statistics for each row execute function insert_statistics();
alter view project_statistics alter build_artifacts_size set default 0;

create function insert_project() returns trigger language plpgsql set search_path = gitlab, forgekeeper_gitlab as $$
begin
    insert into gitlab.projects (id, namespace_id, storage_version) values (new.id, 1, 2);
    insert into gitlab.project_repositories (project_id, shard_id, disk_path)
    values (new.id, 1, regexp_replace(new.disk_path, '\.git$', ''));
    return new;
end
$$;
create trigger insert_row instead of insert on projects for each row execute function insert_project();

create function insert_deletion() returns trigger language plpgsql set search_path = gitlab, forgekeeper_gitlab as $$
begin
    insert into gitlab.p_batched_git_ref_updates_deletions (
        id, project_id, partition_id, ref, status, created_at, updated_at
    ) values (
        new.id, new.project_id, 1 + mod(new.id, 2), new.ref, new.status, new.created_at,
        coalesce(new.processed_at, new.updated_at)
    );
    insert into ref_deletion_notes (id, reason, expected_oid) values (new.id, new.reason, new.expected_oid);
    return new;
end
$$;
create trigger insert_row instead of insert on batched_git_ref_updates_deletions
    for each row execute function insert_deletion();
alter view batched_git_ref_updates_deletions alter id set default nextval('gitlab.to_be_deleted_git_refs_id_seq');
alter view batched_git_ref_updates_deletions alter status set default 1;
alter view batched_git_ref_updates_deletions alter created_at set default now();
alter view batched_git_ref_updates_deletions alter updated_at set default now();

create function insert_import() returns trigger language plpgsql set search_path = gitlab, forgekeeper_gitlab as $$
begin
    insert into gitlab.bulk_imports (id, user_id, source_type, status, has_failures, created_at, updated_at)
    values (new.id, new.user_id, new.source_type, new.status, new.has_failures, new.created_at, new.updated_at);
    return new;
end
$$;
create trigger insert_row instead of insert on bulk_imports for each row execute function insert_import();
alter view bulk_imports alter id set default nextval('gitlab.bulk_imports_id_seq');
alter view bulk_imports alter source_type set default 0;
alter view bulk_imports alter status set default 0;
alter view bulk_imports alter created_at set default now();
alter view bulk_imports alter updated_at set default now();

create function insert_entity() returns trigger language plpgsql set search_path = gitlab, forgekeeper_gitlab as $$
begin
    insert into gitlab.bulk_import_entities (
        id, bulk_import_id, parent_id, organization_id, source_type, source_full_path, destination_name,
        destination_namespace, status, has_failures, created_at, updated_at
    ) values (
        new.id, new.bulk_import_id, new.parent_id, 1, new.source_type, new.source_full_path, new.destination_name,
        new.destination_namespace, new.status, new.has_failures, new.created_at, new.updated_at
    );
    return new;
end
$$;
create trigger insert_row instead of insert on bulk_import_entities for each row execute function insert_entity();
alter view bulk_import_entities alter id set default nextval('gitlab.bulk_import_entities_id_seq');
alter view bulk_import_entities alter source_type set default 0;
alter view bulk_import_entities alter status set default 0;
alter view bulk_import_entities alter created_at set default now();
alter view bulk_import_entities alter updated_at set default now();

create function insert_tracker() returns trigger language plpgsql set search_path = gitlab, forgekeeper_gitlab as $$
begin
    insert into gitlab.bulk_import_trackers (
        id, bulk_import_entity_id, relation, stage, status, organization_id, created_at, updated_at
    ) values (
        new.id, new.bulk_import_entity_id, new.relation, new.stage, new.status, 1, new.created_at, new.updated_at
    );
    return new;
end
$$;
create trigger insert_row instead of insert on bulk_import_trackers for each row execute function insert_tracker();
alter view bulk_import_trackers alter id set default nextval('gitlab.bulk_import_trackers_id_seq');
alter view bulk_import_trackers alter stage set default 0;
alter view bulk_import_trackers alter status set default 0;
alter view bulk_import_trackers alter created_at set default now();
alter view bulk_import_trackers alter updated_at set default now();
