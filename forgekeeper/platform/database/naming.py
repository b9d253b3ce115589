"""Names of relations and columns in SQL, quoted and with their schema.

No other module writes the name of a model's relation into a statement.  A relation is found by `to_regclass` with the
same text, so a look and a deletion cannot mean different tables.  A model without a schema is found by the session's
`search_path`: forgekeeper's own schema first, then the forge's.
"""

from __future__ import annotations

import re
from typing import Any

import peewee as pw

from forgekeeper.platform.database import Base, database

BARE_NAME = re.compile(r"[a-z_][a-z0-9_]*")
"""Names that SQL accepts without quotes, unless they are keywords."""


def quote_name(name: str) -> str:
    """Return a name in double quotes, with its own double quotes escaped."""
    return '"{}"'.format(name.replace('"', '""'))


def name_parts(model: type[Base]) -> tuple[str | None, str]:
    """Return the schema of *model*, None if it is not set, and the name of its table."""
    return model._meta.schema, model._meta.table_name


def relation_name(model: type[Base]) -> str:
    """Return the relation's name in SQL: ``"schema"."table"``, or only ``"table"``."""
    return ".".join(quote_name(part) for part in name_parts(model) if part)


def shown_name(model: type[Base]) -> str:
    """Return the relation's name as people write it: quoted only if SQL requires quotes."""
    return ".".join(part if BARE_NAME.fullmatch(part) else quote_name(part) for part in name_parts(model) if part)


def show_column(name: str) -> str:
    """Return a column's name as people write it: quoted only if SQL requires quotes."""
    return name if BARE_NAME.fullmatch(name) else quote_name(name)


def column_name(field: pw.Field[Any]) -> str:
    """Return a column qualified by its table's name: no alias can be mistaken for it."""
    return f"{table_alias(field.model)}.{quote_name(field.column_name)}"


def table_alias(model: type[Base]) -> str:
    """Return the table's name without a schema, as expressions after ``from`` use it."""
    return quote_name(model._meta.table_name)


def write_expression(model: type[Base], expression: pw.Node) -> tuple[str, list[Any]]:
    """Return *expression* as SQL and its values; columns are qualified by the model's table."""
    context = database.get_sql_context()
    context.alias_manager[model._meta.table] = model._meta.table_name
    with context.scope_normal():
        text, values = context.sql(expression).query()
    return text, list(values)
