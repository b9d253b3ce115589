"""Functions that run with the rights of their owner, and roles that could misuse them.

They belong to our schema and to the forge's views.  The role of forgekeeper has rights on the views alone; such
functions change the tables below.  A role that may create objects in a schema of their search path, or use them in a
trigger of another table, can act as their owner.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from forgekeeper.platform.database import database

# Names are qualified, because the person who runs a cure may have another search_path.
SELECT_DEFINER_FUNCTIONS = """
    select format('%%I.%%I(%%s)', nspname, proname, pg_get_function_identity_arguments(function.oid)),
        proowner::regrole::text,
        array(
            select btrim(schema, ' "') from unnest(proconfig) as setting,
                unnest(string_to_array(substr(setting, length('search_path=') + 1), ',')) as schema
            where setting like 'search_path=%%'
        ),
        array(
            select case grantee when 0 then 'public' else grantee::regrole::text end
            from aclexplode(coalesce(proacl, acldefault('f', proowner)))
            where prorettype = 'trigger'::regtype and grantee <> proowner
                and not exists (select from pg_roles where oid = grantee and rolsuper)
        )
    from pg_proc as function join pg_namespace as schema on schema.oid = pronamespace
    where prosecdef and {which}
    order by 1
"""
IS_IN_SCHEMA = "nspname = %(schema)s"
IS_TRIGGER_OF_VIEW = """exists (
    select from pg_trigger as fires join pg_class as view on view.oid = tgrelid
    where tgfoid = function.oid and relkind = 'v' and relnamespace = to_regnamespace(quote_ident(%(schema)s))
)"""
SELECT_CREATORS = """
    select quote_ident(nspname), case grantee when 0 then 'public' else grantee::regrole::text end
    from pg_namespace, aclexplode(coalesce(nspacl, acldefault('n', nspowner)))
    where nspname = any(%(schemas)s) and privilege_type = 'CREATE'
        and grantee not in (nspowner, %(owner)s::regrole)
        and not exists (select from pg_roles where oid = grantee and rolsuper)
    order by 1, 2
"""
# If several functions have one name, PostgreSQL calls the function with the best matching types, in any schema.
SELECT_NAMESAKES = """
    select format(called, nspname), owner::regrole::text
    from (
        select format('function %%%%I.%%I(%%s)', proname, pg_get_function_identity_arguments(oid)), pronamespace,
            proowner, exists (
                select from pg_proc as own
                where own.proname = it.proname and own.pronamespace = 'pg_catalog'::regnamespace
            )
        from pg_proc as it
        union all
        select format('operator %%%%I.%%s (%%s, %%s)', oprname, oprleft::regtype, oprright::regtype), oprnamespace,
            oprowner, exists (
                select from pg_operator as own
                where own.oprname = it.oprname and own.oprnamespace = 'pg_catalog'::regnamespace
            )
        from pg_operator as it
    ) as it (called, schema, owner, has_namesake) join pg_namespace on pg_namespace.oid = schema
    where has_namesake and nspname = any(%(schemas)s) and owner not in (nspowner, %(owner)s::regrole)
        and not exists (select from pg_roles where oid = owner and rolsuper)
    order by 1
"""


def find_misused_functions(schema: str) -> Iterator[str]:
    """Yield a sentence, with the cure, for each misuse of functions in *schema*."""
    return _find_misuses(IS_IN_SCHEMA, schema)


def find_misused_triggers(schema: str) -> Iterator[str]:
    """Yield the sentences of `find_misused_functions` for the triggers of views in *schema*."""
    return _find_misuses(IS_TRIGGER_OF_VIEW, schema)


def _find_misuses(which: str, schema: str) -> Iterator[str]:
    searched = defaultdict[str, set[str]](set)
    found = database.execute_sql(SELECT_DEFINER_FUNCTIONS.format(which=which), {"schema": schema}).fetchall()
    for function, owner, schemas, executors in found:
        rights = f"function {function} runs with the rights of {owner}"
        if not schemas:
            cure = f"alter function {function} set search_path = SCHEMA, pg_temp"
            yield f"{rights} and resolves names by its caller's search_path: `{cure}`"
        for role in executors:
            cure = f"revoke execute on function {function} from {role}"
            yield f"{rights}, and {role} may use it as a trigger of another table: `{cure}`"
        searched[owner] |= {*schemas}
    for owner, schemas in searched.items():
        yield from find_untrusted_roles(schemas, owner)


def find_untrusted_roles(schemas: Collection[str], owner: str) -> Iterator[str]:
    """Yield a sentence, with the cure, for each role that may or did create in *schemas*.

    Functions that search these schemas run with the rights of *owner*, written as in SQL.  The owners of the schemas
    and superusers may create functions there.
    """
    values = {"schemas": list(schemas), "owner": owner}
    for schema, role in database.execute_sql(SELECT_CREATORS, values).fetchall():
        keep = f"grant create on schema {schema} to {owner}; revoke create on schema {schema} from {role}"
        yield (
            f"{role} may create objects in schema {schema}, which functions with the rights of {owner} search: `{keep}`"
        )
    for called, role in database.execute_sql(SELECT_NAMESAKES, values).fetchall():
        yield (f"{called} of {role} hides PostgreSQL's own from functions with the rights of {owner}: `drop {called}`")
