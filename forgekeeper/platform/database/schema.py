"""Differences between the database and the models, and schemas that a role may not use.

The forge owns most of these tables.  Views may give them the names and columns that the statements need.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from forgekeeper.platform.database import Base, database
from forgekeeper.platform.database.naming import name_parts, relation_name
from forgekeeper.platform.database.relations import find_misfits, index_statements, read_columns

SELECT_INDEXES = """
    select pg_get_indexdef(indexrelid) from pg_index
    where indrelid = any(array(select to_regclass(name)::oid from unnest(%s::text[]) as name))
"""


class SchemaDifference(NamedTuple):
    """A missing table, column or index; *is_harmless* if batches only become slower without it."""

    sentence: str
    is_harmless: bool


def find_differences(models: Sequence[type[Base]]) -> Iterator[SchemaDifference]:
    """Yield differences of tables, columns and indexes; indexes are compared by definition."""
    names = _relation_names(models)
    tables = read_columns(names)
    indexes = {_index_shape(row[0]) for row in database.execute_sql(SELECT_INDEXES, (names,)).fetchall()}
    for model, table in zip(models, names, strict=True):
        yield from (SchemaDifference(said, is_harmless=False) for said in find_misfits(model, tables))
        if table in tables:
            yield from _find_missing_indexes(model, indexes)


def _relation_names(models: Sequence[type[Base]]) -> list[str]:
    return [relation_name(model) for model in models]


def _find_missing_indexes(model: type[Base], present: set[str]) -> Iterator[SchemaDifference]:
    for statement in index_statements(model):
        shape = _index_shape(statement)
        if present.isdisjoint({shape, f"unique {shape}"}):
            unique = shape.startswith("unique ")
            harm = "rows may be duplicated" if unique else "runs will be slow"
            yield SchemaDifference(f"an index is missing, {harm}: {statement}", is_harmless=not unique)


def _index_shape(statement: str) -> str:
    """Reduce an index to its table and keys: names, spelling and conditions differ too often."""
    match = re.search(
        r" on (?:only )?(?:\"?\w+\"?\.)?\"?(\w+)\"?\s*(?:using \w+ )?(.*)", statement, re.IGNORECASE | re.DOTALL
    )
    assert match, f"not an index: {statement}"
    keys = re.split(r"\bwhere\b", match[2], flags=re.IGNORECASE)[0]
    unique = "unique " if re.match(r"\s*create\s+unique", statement, re.IGNORECASE) else ""
    return f"{unique}{match[1]} {re.sub(r'::[a-z]+|[^a-z0-9_,+]', '', keys.lower())}"


MIGRATIONS_TABLE = "forgekeeper_migrations"
"""Table of the applied migrations, which every command reads."""

# Tables in a schema without the usage privilege look as if they were missing.
SELECT_CLOSED_SCHEMAS = """
    select distinct quote_ident(n.nspname), quote_ident(current_user)
    from unnest(%s::text[], %s::text[]) as wanted (name, schema)
        join pg_class as c on c.relname = name
        join pg_namespace as n on n.oid = c.relnamespace
    where not has_schema_privilege(n.oid, 'usage')
        and case when schema is null then to_regclass(quote_ident(name)) is null else n.nspname = schema end
"""


def find_closed_schemas(models: Sequence[type[Base]]) -> Iterator[str]:
    """Yield a sentence, with the ``grant``, for each schema that this role may not use."""
    schemas, names = zip((None, MIGRATIONS_TABLE), *map(name_parts, models), strict=True)
    for schema, role in database.execute_sql(SELECT_CLOSED_SCHEMAS, (list(names), list(schemas))).fetchall():
        yield f"{role} may not use schema {schema}: `grant usage on schema {schema} to {role}`"
