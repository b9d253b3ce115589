-- A flag that GitLab has no row of is at the default of its code, which the database does not know: it is off here.
create or replace view VIEWS.forge_flags as
select feature.key::text as name, coalesce(gates.on_for_all or gates.on_here, false) and not coalesce(gates.out, false)
    as enabled
from TABLES.features as feature, lateral (
    select bool_or(key = 'boolean' and value = 'true') as on_for_all,
        bool_or(here and right(value, 8) <> ':opt_out') as on_here,
        bool_or(here and right(value, 8) = ':opt_out') as out
    from (
        select key, value, key = 'actors' and left(value, 22) = 'FlipperGitlabInstance:' as here
        from TABLES.feature_gates where feature_key = feature.key
    ) as gate
) as gates;
