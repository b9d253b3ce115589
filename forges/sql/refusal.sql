-- Rows of some views are locked and deleted, and never changed.
create or replace function VIEWS.refuse_update() returns trigger
    language plpgsql as $$
begin
    raise exception 'rows of % are locked and deleted here, they are not changed', tg_table_name
        using errcode = 'with_check_option_violation';
end
$$;
