"""What the database lacks of what the models expect, and what a role may not do there.

The forge owns most of these tables.  Views are welcome, to give them the names and columns that the statements want.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from forgekeeper.database import Base, database

COLUMNS = """
    select c.relname, a.attname, format_type(a.atttypid, null), c.relkind = 'v'
    from pg_attribute a join pg_class c on c.oid = a.attrelid
    where c.oid = any(array(select to_regclass(name)::oid from unnest(%s::text[]) as name)) and a.attnum > 0
      and not a.attisdropped
"""
INDEXES = """
    select pg_get_indexdef(indexrelid) from pg_index
    where indrelid = any(array(select to_regclass(name)::oid from unnest(%s::text[]) as name))
"""
TYPES = {
    "bigauto": "bigint",
    "bool": "boolean",
    "int": "integer",
    "json": "jsonb",
    "timestamptz": "timestamp with time zone",
    "varchar": "character varying",
}
"""What PostgreSQL calls the types that peewee calls otherwise."""
ALIKE = ({"text", "character varying"}, {"bigint", "integer", "smallint"})
"""Types that may stand in for one another: the forge chose them, and the statements do not care."""


class Difference(NamedTuple):
    """What is missing; harmless if the batches only get slower by it."""

    sentence: str
    harmless: bool


def differences(models: Sequence[type[Base]]) -> Iterator[Difference]:
    """Yield what the tables of *models* lack in this database: tables, columns, indexes."""
    names = _names(models)
    columns: dict[str, dict[str, str]] = defaultdict(dict)
    views = set()
    for table, column, kind, is_view in database.execute_sql(COLUMNS, (names,)).fetchall():
        columns[table][column] = kind
        if is_view:
            views.add(table)
    indexes = {_shape(row[0]) for row in database.execute_sql(INDEXES, (names,)).fetchall()}
    for model, table in zip(models, names, strict=True):
        if table not in columns and model.optional:
            continue
        if table not in columns:
            yield Difference(f"table {table} is missing", harmless=False)
            continue
        yield from _columns(model, columns[table])
        # A view has none of its own; those of the tables below it are called otherwise.
        if table not in views:
            yield from _indexes(model, indexes)


def _names(models: Sequence[type[Base]]) -> list[str]:
    return [model._meta.table_name for model in models]


def _columns(model: type[Base], present: dict[str, str]) -> Iterator[Difference]:
    table = model._meta.table_name
    for field in model._meta.sorted_fields:
        kind = field.field_type.split()[0].lower()
        wanted = TYPES.get(kind, kind) + "[]" * getattr(field, "dimensions", 0)
        found = present.get(field.column_name)
        if found is None:
            yield Difference(f"column {table}.{field.column_name} is missing", harmless=False)
        elif wanted != found and not any({wanted, found} <= alike for alike in ALIKE):
            yield Difference(f"column {table}.{field.column_name} is {found}, should be {wanted}", harmless=False)


def _indexes(model: type[Base], present: set[str]) -> Iterator[Difference]:
    for context in model._schema._create_indexes(safe=False):  # type: ignore[attr-defined]
        statement, _parameters = context.query()
        shape = _shape(statement)
        if present.isdisjoint({shape, f"unique {shape}"}):
            unique = shape.startswith("unique ")
            harm = "rows may come twice" if unique else "runs will be slow"
            yield Difference(f"an index is missing, {harm}: {' '.join(statement.split())}", harmless=not unique)


def _shape(statement: str) -> str:
    """Reduce an index to its table and keys: names, spelling and conditions differ too easily."""
    match = re.search(
        r" on (?:only )?(?:\w+\.)?\"?(\w+)\"?\s*(?:using \w+ )?(.*)", statement, re.IGNORECASE | re.DOTALL
    )
    assert match, f"not an index: {statement}"
    keys = re.split(r"\bwhere\b", match[2], flags=re.IGNORECASE)[0]
    unique = "unique " if re.match(r"\s*create\s+unique", statement, re.IGNORECASE) else ""
    return f"{unique}{match[1]} {re.sub(r'::[a-z]+|[^a-z0-9_,+]', '', keys.lower())}"


MIGRATIONS = "forgekeeper_migrations"
"""What `migrate` remembers; every command looks into it."""

ORDER = ("select", "insert", "update", "delete")
PRIVILEGE = re.compile(r"\w+(?: \(.*?\))?")

CALLED = """
    select quote_ident(nspname) || '.' || quote_ident(relname) from pg_class as c
        join pg_namespace as n on n.oid = relnamespace where c.oid = to_regclass(%s) and nspname <> 'public'
"""
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
    for schema, role in database.execute_sql(CLOSED, ([MIGRATIONS, *_names(models)],)).fetchall():
        yield f"{role} may not use schema {schema}: `grant usage on schema {schema} to {role}`"


def lacking(models: Sequence[type[Base]]) -> Iterator[str]:
    """Yield a sentence for each table on which this role lacks a privilege, and what to grant."""
    (role,) = database.execute_sql("select quote_ident(current_user)").fetchone()
    wanted = {model._meta.table_name: (needs(model), model._meta.columns) for model in models}
    for table, (all_needs, columns) in ({MIGRATIONS: (["select"], {})} | wanted).items():
        if lacks := [need for need in all_needs if _lacks(table, need, columns)]:
            refused = " or ".join(need.split()[0] for need in lacks)
            (called,) = database.execute_sql(CALLED, (table,)).fetchone() or (table,)
            yield f"{role} may not {refused} {table}: `grant {', '.join(lacks)} on {called} to {role}`"


def _lacks(table: str, need: str, columns: Iterable[str]) -> bool:
    privilege, *named = re.findall(r"\w+", need)
    # A role that may read all the columns may read the table, as far as we do.
    wanted = list(columns) if privilege == "select" else named
    row = database.execute_sql(LACKS, {"table": table, "privilege": privilege, "columns": wanted}).fetchone()
    return row is not None and bool(row[0])
