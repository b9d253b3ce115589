create or replace function VIEWS.record_deletion() returns trigger
    language plpgsql security definer set search_path = TABLES, pg_temp as $$
begin
    execute format('insert into %I (fully_qualified_table_name, primary_key_value) values ($1, $2)', tg_table_name)
    using current_schema() || '.' || split_part(new.fully_qualified_table_name, '.', -1), new.primary_key_value;
    return new;
end
$$;
