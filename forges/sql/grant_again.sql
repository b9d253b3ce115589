do $grant$
declare
    granted record;
begin
    for granted in
        select privilege_type, relname, was.attname, case grantee when 0 then 'public' else grantee::regrole::text end as role
        from forgekeeper_granted as was join pg_class using (relname)
        where relnamespace = 'VIEWS'::regnamespace and grantee <> relowner and (was.attname is null or exists (
            select from pg_attribute as still
            where attrelid = pg_class.oid and still.attname = was.attname and not attisdropped
        ))
    loop
        execute format(
            'grant %s %s on VIEWS.%I to %s', granted.privilege_type,
            coalesce('(' || quote_ident(granted.attname) || ')', ''), granted.relname, granted.role
        );
    end loop;
end
$grant$;
