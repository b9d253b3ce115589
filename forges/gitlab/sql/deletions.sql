-- GitLab's cleanup deletes what belongs to a row that is recorded here.  So only tables whose rows the views delete are
-- accepted, and only rows that are deleted.
--
-- The search_path begins with the schema of the tables, because GitLab's triggers ask for current_schema().  PostgreSQL
-- searches pg_catalog before it as long as the path does not name pg_catalog.  That is not enough for a function or an
-- operator: of several, the one with the best fitting types is called, whatever its schema.  So these are qualified, or
-- have the exact types of pg_catalog's.
create or replace function VIEWS.record_deletion() returns trigger
    language plpgsql security definer set search_path = TABLES, pg_temp as $$
declare
    deleted_from constant text := pg_catalog.split_part(new.fully_qualified_table_name, '.', -1);
    still_exists boolean;
begin
    if deleted_from = 'user_statuses' then
        still_exists := exists (select from TABLES.user_statuses where user_id = new.primary_key_value);
    elsif deleted_from in ('p_ci_job_artifacts', 'ci_job_artifacts') then
        still_exists := exists (select from TABLES.ARTIFACTS where id = new.primary_key_value);
    elsif deleted_from = 'p_batched_git_ref_updates_deletions' then
        still_exists := exists (
            select from TABLES.p_batched_git_ref_updates_deletions where id = new.primary_key_value
        );
    end if;
    if still_exists is distinct from false then
        raise exception 'GitLab is told of deletions alone: row % of % was not deleted by a view',
            new.primary_key_value, new.fully_qualified_table_name using errcode = 'with_check_option_violation';
    end if;
    execute pg_catalog.format(
        'insert into %I.%I (fully_qualified_table_name, primary_key_value) values ($1, $2)',
        pg_catalog.current_schema()::text, tg_table_name::text
    ) using pg_catalog.concat(pg_catalog.current_schema(), '.', deleted_from), new.primary_key_value;
    return new;
end
$$;
