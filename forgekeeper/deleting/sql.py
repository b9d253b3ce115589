"""Expressions of peewee as SQL with named values, so that the same statement is prepared once for all runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import peewee as pw

from forgekeeper.database import Base, database

PLACE = re.compile(r"%s|%%")


class Condition(NamedTuple):
    """A condition over one table's columns, and the values that it names."""

    text: str
    values: dict[str, Any]


def condition(model: type[Base], expression: pw.Node, *, name: str = "due") -> Condition:
    """Write *expression* over the model's columns down; its values are called *name* and a number."""
    context = database.get_sql_context()
    context.alias_manager[model._meta.table] = model._meta.table_name
    with context.scope_normal():
        text, values = context.sql(expression).query()
    return named(text, values, name=name)


def named(text: str, values: Sequence[Any], *, name: str) -> Condition:
    """Return SQL with its values called *name* and a number."""
    numbers = iter(range(len(values)))

    def call(found: re.Match[str]) -> str:
        return found[0] if found[0] == "%%" else f"%({name}_{next(numbers)})s"

    return Condition(PLACE.sub(call, text), {f"{name}_{number}": value for number, value in enumerate(values)})


def column(field: pw.Field[Any]) -> str:
    """Return the column with its table's name: no alias of a statement is taken for it."""
    return f'"{field.model._meta.table_name}"."{field.column_name}"'
