-- A view follows a column or table that is renamed: it then shows the old one under the name of the new one.  So the
-- definition of each view is recorded, by its digest, and compared before each run (`Below` in guards/preconditions.py).
create or replace function VIEWS.find_changed_views(views oid[]) returns setof text
    language sql stable set search_path = pg_catalog, pg_temp as $$
select relname::text from pg_class
where relnamespace = 'VIEWS'::regnamespace and relkind = 'v' and oid = any(views)
    and obj_description(oid, 'pg_class') is distinct from 'made by forgekeeper, ' || md5(pg_get_viewdef(oid))
$$;
do $record$
declare
    made record;
begin
    for made in
        select oid, relname from pg_class where relnamespace = 'VIEWS'::regnamespace and relkind = 'v'
    loop
        execute format(
            'comment on view %s is %L', made.oid::regclass, 'made by forgekeeper, ' || md5(pg_get_viewdef(made.oid))
        );
    end loop;
end
$record$;
