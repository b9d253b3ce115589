"""The columns of deleted rows that the audit keeps: of restorable rows each column of the model."""

from __future__ import annotations

from typing import Any

from forgekeeper.api.answers import Rows
from forgekeeper.platform.database.naming import quote_name


def map_audit_names(rows: Rows[Any]) -> dict[str, str]:
    """Return the name in the audit of each column of the model: the answer's name, or else the column's own."""
    names = {column: name for name, column in rows.audit.items()}
    names[rows.model._meta.primary_key.column_name] = "id"
    if not rows.due_delay:
        names[rows.since.column_name] = "due"
    return {one.column_name: names.get(one.column_name, one.column_name) for one in rows.model._meta.sorted_fields}


def write_audit_expressions(rows: Rows[Any]) -> dict[str, str]:
    """Return the expressions in SQL that the audit keeps of each row, by name, besides its id and its due time."""
    if not rows.restorable:
        return dict(rows.audit)
    columns = {name: quote_name(column) for column, name in map_audit_names(rows).items()}
    return {name: column for name, column in columns.items() if name not in {"id", "due"}} | dict(rows.audit)
