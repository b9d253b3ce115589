"""What forgekeeper's role has to be granted, table by table, and what it lacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from forgekeeper.database import Base, database

MIGRATIONS = "forgekeeper_migrations"
"""What `migrate` remembers; every command looks into it."""

LACKING = """
    select wanted.name, wanted.privilege, wanted.col, to_regclass(wanted.name)::text, quote_ident(current_user)
    from unnest(%s::text[], %s::text[], %s::text[]) with ordinality as wanted (name, privilege, col, number)
    where to_regclass(wanted.name) is not null
      and case
        when wanted.col is null then not has_table_privilege(to_regclass(wanted.name), wanted.privilege)
        else exists (
            select from pg_attribute
            where attrelid = to_regclass(wanted.name)::oid and attname = wanted.col and not attisdropped
              and not has_column_privilege(attrelid, attnum, wanted.privilege)
        )
      end
    order by wanted.number
"""
# A schema that one may not use hides its tables: they look as if they were missing.
CLOSED = """
    select distinct quote_ident(n.nspname), quote_ident(current_user)
    from unnest(%s::text[]) as name
        join pg_class as c on c.relname = name
        join pg_namespace as n on n.oid = c.relnamespace
    where to_regclass(name) is null and not has_schema_privilege(n.oid, 'usage')
"""


class Need(NamedTuple):
    """A privilege on a table: on these columns, or on all of it."""

    table: str
    privilege: str
    columns: tuple[str, ...] = ()


def needs(models: Sequence[type[Base]], process: str | None = None) -> Iterator[Need]:
    """Yield what *process* needs on the tables of *models*; what all of them together need, if it is None."""
    for model in models:
        table, use = model._meta.table_name, model.used_by
        if process is None or process in use.readers:
            yield Need(table, "select")
        for privilege, columns, who in use.changes:
            if process is None or process in who:
                yield Need(table, privilege, columns)


def grants(models: Sequence[type[Base]], role: str, process: str | None = None) -> str:
    """Write what *role* has to be granted to be *process*, or all of them, as SQL; `public` is where the tables are."""
    lines = [f"grant usage on schema public to {role};"]
    if process != "exporter":
        lines.append(f"grant select on {MIGRATIONS} to {role};")
    for model in models:
        wanted = ", ".join(_spelled(need) for need in needs([model], process))
        if wanted:
            lines.append(f"grant {wanted} on {model._meta.table_name} to {role};")
    return "\n".join(lines) + "\n"


def closed(models: Sequence[type[Base]]) -> Iterator[str]:
    """Yield a sentence for each schema whose tables are hidden, because this role may not use it."""
    names = [MIGRATIONS, *(model._meta.table_name for model in models)]
    for schema, role in database.execute_sql(CLOSED, (names,)).fetchall():
        yield f"{role} may not use schema {schema}: `grant usage on schema {schema} to {role}`"


def lacking(models: Sequence[type[Base]]) -> Iterator[str]:
    """Yield a sentence for each table on which this role lacks a privilege, and what to grant."""
    columns = {model._meta.table_name: [field.column_name for field in model._meta.sorted_fields] for model in models}
    wanted = [
        (need.table, need.privilege, column)
        for need in (Need(MIGRATIONS, "select"), *needs(models))
        # A role that may read all the columns may read the table, as far as we do.
        for column in (need.columns or (columns.get(need.table, [None]) if need.privilege == "select" else [None]))
    ]
    found: dict[str, dict[str, list[str | None]]] = {}
    role = ""
    for _name, privilege, column, table, role in database.execute_sql(  # noqa: B007, it is the same in all
        LACKING, tuple(map(list, zip(*wanted, strict=True)))
    ).fetchall():
        found.setdefault(table, {}).setdefault(privilege, []).append(column)
    for table, lacks in found.items():
        spelled = ", ".join(
            _spelled(Need(table, privilege, _only(missing, columns.get(table, []))))
            for privilege, missing in lacks.items()
        )
        yield f"{role} may not {' or '.join(lacks)} {table}: `grant {spelled} on {table} to {role}`"


def _only(missing: list[str | None], all_columns: list[str]) -> tuple[str, ...]:
    """Name the columns, unless it is the whole table."""
    named = tuple(column for column in missing if column is not None)
    return () if len(named) == len(all_columns) else named


def _spelled(need: Need) -> str:
    return f"{need.privilege} ({', '.join(need.columns)})" if need.columns else need.privilege
