-- PostgreSQL replaces no view that has other columns.  So all are made anew, and what was granted on them is granted again.
create temporary table forgekeeper_granted on commit drop as
select relname, null::name as attname, (aclexplode(relacl)).*
from pg_class where relnamespace = 'VIEWS'::regnamespace and relkind = 'v'
union all
select relname, attname, (aclexplode(attacl)).*
from pg_class join pg_attribute on attrelid = pg_class.oid
where relnamespace = 'VIEWS'::regnamespace and relkind = 'v' and attnum > 0 and not attisdropped;
do $drop$
declare
    known text;
begin
    foreach known in array array[EVERY_VIEW] loop
        execute format('drop view if exists VIEWS.%I', known);
    end loop;
end
$drop$;
