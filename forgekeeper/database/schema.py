"""Does the database have what the models expect?  The forge owns most of these tables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
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
    "bigint": "bigint",
    "bool": "boolean",
    "date": "date",
    "int": "integer",
    "json": "jsonb",
    "jsonb": "jsonb",
    "smallint": "smallint",
    "text": "text",
    "timestamptz": "timestamp with time zone",
    "uuid": "uuid",
    "varchar": "character varying",
}
ALIKE = ({"text", "character varying"}, {"bigint", "integer", "smallint"})
"""Types that may stand in for one another: the forge chose them, and the statements do not care."""


class Difference(NamedTuple):
    """What is missing; harmless if the batches only get slower by it."""

    sentence: str
    harmless: bool


def differences(models: Sequence[type[Base]]) -> Iterator[Difference]:
    """Yield what the tables of *models* lack in this database: tables, columns, indexes."""
    names = [model._meta.table_name for model in models]
    columns: dict[str, dict[str, str]] = {}
    views = set()
    for table, column, kind, is_view in database.execute_sql(COLUMNS, (names,)).fetchall():
        columns.setdefault(table, {})[column] = kind
        if is_view:
            views.add(table)
    indexes = {_shape(row[0]) for row in database.execute_sql(INDEXES, (names,)).fetchall()}
    for model in models:
        table = model._meta.table_name
        if table not in columns:
            yield Difference(f"table {table} is missing", harmless=False)
            continue
        yield from _columns(model, columns[table])
        # A view has none of its own; those of the tables below it are called otherwise.
        if table not in views:
            yield from _indexes(model, indexes)


def _columns(model: type[Base], present: dict[str, str]) -> Iterator[Difference]:
    table = model._meta.table_name
    for field in model._meta.sorted_fields:
        wanted = TYPES[field.field_type.split()[0].lower()] + "[]" * getattr(field, "dimensions", 0)
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
