-- Who locks a row needs the right to update it; nothing else is done with that right.
create or replace function VIEWS.refuse_update() returns trigger
    language plpgsql as $$
begin
    raise exception 'rows of % are locked and deleted here, they are not changed', tg_table_name
        using errcode = 'with_check_option_violation';
end
$$;
create or replace trigger refuse instead of update on VIEWS.user_statuses
    for each row execute function VIEWS.refuse_update();
create or replace trigger refuse instead of update on VIEWS.ci_job_artifacts
    for each row execute function VIEWS.refuse_update();
