-- GitLab's triggers write here what was deleted, by current_schema(): for forgekeeper that is a schema of its own.
create or replace view VIEWS.RECORDS as
select fully_qualified_table_name, primary_key_value from TABLES.RECORDS;
create or replace trigger record instead of insert on VIEWS.RECORDS
    for each row execute function VIEWS.record_deletion();
