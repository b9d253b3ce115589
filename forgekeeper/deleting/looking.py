"""What a run would delete of rows: counted by the very condition by which it deletes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forgekeeper.database.survey import Rows as Found
from forgekeeper.database.survey import held
from forgekeeper.declaring.preview import Look, Part
from forgekeeper.declaring.rows import Rows
from forgekeeper.deleting.statement import column, condition


def preview(rows: Rows[Any], look: Look) -> Iterator[Part]:
    """Count what a run would delete; what counts towards a total that another session has locked is busy, too."""
    due = condition(rows.model, rows.due)
    columns = {"name": rows.name, "project": rows.project}
    named = {name: column(found) for name, found in columns.items() if found is not None}
    if rows.size is not None:
        named["size"] = f"coalesce({column(rows.size)}, 0)"
    if rows.total is not None:
        table, key = rows.total.table, rows.total.key
        named["busy"] = f"{column(rows.total.of)} in (select {key} from {table} where {held(table)})"
    since, key = column(rows.since), column(rows.model._meta.primary_key)
    where = f"{due.text} and {since} is not null"
    found = Found(rows.model._meta.table_name, where, due.values, due=since, key=key, **named)
    yield look.count(look.part(rows.record, verb=rows.verb), found, after=rows.after)
