"""What forgekeeper's role has to be granted, table by table, and what it lacks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from forgekeeper.database import Base, database

MIGRATIONS = "forgekeeper_migrations"
"""What `migrate` remembers; every command looks into it."""

ORDER = ("select", "insert", "update", "delete")
PRIVILEGE = re.compile(r"\w+(?: \(.*?\))?")

LACKS = """
    select case when %(columns)s::text[] = '{}' then not has_table_privilege(oid, %(privilege)s) else exists (
        select from pg_attribute where attrelid = oid and attname = any(%(columns)s) and not attisdropped
            and not has_column_privilege(oid, attnum, %(privilege)s)
    ) end
    from (select to_regclass(%(table)s)::oid as oid) as found where oid is not null
"""
# A schema that one may not use hides its tables: they look as if they were missing.
CLOSED = """
    select distinct quote_ident(n.nspname), quote_ident(current_user)
    from unnest(%s::text[]) as name
        join pg_class as c on c.relname = name
        join pg_namespace as n on n.oid = c.relnamespace
    where to_regclass(name) is null and not has_schema_privilege(n.oid, 'usage')
"""


def needs(model: type[Base], process: str | None = None) -> list[str]:
    """Return what *process* needs on the table of *model*, as ``update (id)``, or all together if it is None."""
    of_each = (part.split(": ") for part in model.grants.split("; "))
    granted = ", ".join(text for who, text in of_each if process in (None, who))
    return sorted({*PRIVILEGE.findall(granted)}, key=lambda need: ORDER.index(need.split()[0]))


def closed(models: Sequence[type[Base]]) -> Iterator[str]:
    """Yield a sentence for each schema whose tables are hidden, because this role may not use it."""
    names = [MIGRATIONS, *(model._meta.table_name for model in models)]
    for schema, role in database.execute_sql(CLOSED, (names,)).fetchall():
        yield f"{role} may not use schema {schema}: `grant usage on schema {schema} to {role}`"


def lacking(models: Sequence[type[Base]]) -> Iterator[str]:
    """Yield a sentence for each table on which this role lacks a privilege, and what to grant."""
    (role,) = database.execute_sql("select quote_ident(current_user)").fetchone()
    wanted = {model._meta.table_name: (needs(model), model._meta.columns) for model in models}
    for table, (all_needs, columns) in ({MIGRATIONS: (["select"], {})} | wanted).items():
        if lacks := [need for need in all_needs if _lacks(table, need, columns)]:
            refused = " or ".join(need.split()[0] for need in lacks)
            yield f"{role} may not {refused} {table}: `grant {', '.join(lacks)} on {table} to {role}`"


def _lacks(table: str, need: str, columns: Iterable[str]) -> bool:
    privilege, *named = re.findall(r"\w+", need)
    # A role that may read all the columns may read the table, as far as we do.
    wanted = list(columns) if privilege == "select" else named
    row = database.execute_sql(LACKS, {"table": table, "privilege": privilege, "columns": wanted}).fetchone()
    return row is not None and bool(row[0])
