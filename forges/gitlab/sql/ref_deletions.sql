-- What GitLab's table has no columns for.  Without a foreign key, for which no partition could be detached.
create table if not exists VIEWS.ref_deletion_notes (id bigint primary key, reason text, expected_oid text);
delete from VIEWS.ref_deletion_notes as note
where not exists (select from TABLES.p_batched_git_ref_updates_deletions as deletion where deletion.id = note.id);

-- The notes are subqueries: over an outer join rows can be neither locked nor deleted.
-- A deletion stays hidden while its project exists and the view `projects` does not show where its repository is: a
-- project without a repository would have its rows closed.
create or replace view VIEWS.batched_git_ref_updates_deletions as
select deletion.id, deletion.project_id, deletion.ref,
    (select expected_oid from VIEWS.ref_deletion_notes as note where note.id = deletion.id) as expected_oid,
    deletion.status,
    (select reason from VIEWS.ref_deletion_notes as note where note.id = deletion.id) as reason,
    deletion.created_at, deletion.updated_at,
    case when deletion.status = 2 then deletion.updated_at end as processed_at,
    deletion.partition_id
from TABLES.p_batched_git_ref_updates_deletions as deletion
where not exists (
    select from TABLES.projects as project
    where project.id = deletion.project_id and not (
        project.repository_storage = 'default' and (
            coalesce(project.storage_version, 0) >= 1
            or exists (
                select from TABLES.project_repositories as repository where repository.project_id = project.id
            )
        )
    )
);

-- A refused deletion is 3 in GitLab's own column: it reads that as no status, and drops the row with its partition.
-- Left pending, it would keep its partition for ever; as 2 it could not be told from one that was made.
-- An update that records the oid of the first look changes the note alone.
create or replace function VIEWS.close_ref_deletion() returns trigger
    language plpgsql security definer set search_path = TABLES, pg_temp as $$
begin
    if (old.status, new.status) not in ((1, 1), (1, 2), (1, 3), (3, 1)) then
        raise exception 'pending deletions alone are closed here, and refused ones alone are pending again'
            using errcode = 'with_check_option_violation';
    end if;
    if new.status <> old.status or new.updated_at <> old.updated_at then
        update TABLES.p_batched_git_ref_updates_deletions as deletion
        set status = new.status, updated_at = new.updated_at
        where deletion.id = old.id and deletion.partition_id = old.partition_id and deletion.status = old.status;
        if not found then
            return null;
        end if;
    end if;
    if new.reason is distinct from old.reason or new.expected_oid is distinct from old.expected_oid then
        insert into VIEWS.ref_deletion_notes as note (id, reason, expected_oid)
        values (old.id, new.reason, new.expected_oid)
        on conflict (id) do update set reason = excluded.reason, expected_oid = excluded.expected_oid;
    end if;
    return new;
end
$$;
create or replace trigger close instead of update on VIEWS.batched_git_ref_updates_deletions
    for each row execute function VIEWS.close_ref_deletion();
