"""SQL that turns the filled tables of GitLab 17.10 into the tables of another version."""

INTEGERS = """
    alter table p_ci_job_artifacts alter project_id type integer;
    alter table projects alter id type integer;
    alter table namespaces alter id type integer, alter traversal_ids type integer[];
    alter table ci_deleted_objects drop project_id, drop created_at;
"""
# Not partitioned; the column `id` has a sequence of its own.
UNPARTITIONED_TABLE = """
    create table whole (like p_ci_job_artifacts including defaults including constraints);
    insert into whole select * from p_ci_job_artifacts;
    drop table p_ci_job_artifacts, p_ci_job_artifact_reports cascade;
    alter table whole rename to ci_job_artifacts;
    alter table ci_job_artifacts add primary key (id, partition_id),
        alter id set default nextval('ci_job_artifacts_id_seq');
    create unique index on ci_job_artifacts (job_id, file_type, partition_id);
    alter table ci_job_artifact_states add foreign key (job_artifact_id, partition_id)
        references ci_job_artifacts (id, partition_id) on delete cascade;
    alter table p_ci_build_trace_metadata add foreign key (trace_artifact_id, partition_id)
        references ci_job_artifacts (id, partition_id) on delete cascade;
    create view gitlab_partitions_dynamic.p_ci_job_artifacts as select * from ci_job_artifacts;
    set search_path = gitlab, gitlab_partitions_dynamic;
"""
ALL_PARTS_ELSEWHERE = """
    alter table ci_job_artifacts set schema gitlab_partitions_dynamic;
    alter table p_ci_job_artifacts add exposed_as text check (char_length(exposed_as) <= 100), add exposed_paths text[];
    alter table bulk_imports add organization_id bigint not null default 1;
    create function bulk_import_trackers_sharding_key() returns trigger language plpgsql as $$
    begin
        if num_nonnulls(new.namespace_id, new.organization_id, new.project_id) <> 1 then
            select namespace_id, organization_id, project_id
            into new.namespace_id, new.organization_id, new.project_id
            from bulk_import_entities where id = new.bulk_import_entity_id;
        end if;
        return new;
    end
    $$;
    drop trigger takes_project_id on bulk_import_trackers;
    drop trigger takes_namespace_id on bulk_import_trackers;
    drop trigger takes_organization_id on bulk_import_trackers;
    create trigger sharding_key before insert or update on bulk_import_trackers
        for each row execute function bulk_import_trackers_sharding_key();
"""
MORE_RECORDS = """
    create table loose_foreign_keys_ci_deleted_records (like loose_foreign_keys_deleted_records including all);
    create table loose_foreign_keys_project_deleted_records (like loose_foreign_keys_deleted_records including all);
    alter table project_repositories add foreign key (project_id) references projects (id) on delete cascade;
"""
NO_FAILURES = """
    alter table bulk_imports drop has_failures;
    alter table bulk_import_entities drop has_failures;
"""
VERSIONS = {
    "16.3": INTEGERS + UNPARTITIONED_TABLE + NO_FAILURES,
    "16.9": INTEGERS + UNPARTITIONED_TABLE,
    "17.3": INTEGERS,
    "17.10": "",
    "18.7": ALL_PARTS_ELSEWHERE,
    "19.3": ALL_PARTS_ELSEWHERE + MORE_RECORDS,
}
