"""Checks by the plan whether PostgreSQL uses a needed index; nothing is executed.

This works for views and partitions, too: the plan shows the tables below.  The size of the tables does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forgekeeper.platform.database import database
from forgekeeper.platform.database.relations import Index, Relation

OFF = "".join(f"set local enable_{what} = off; " for what in ("seqscan", "bitmapscan", "sort", "incremental_sort"))
# Without indexes the plan names every column and condition that an index would need.
READ_ALL = OFF + "set local enable_indexscan = off; set local enable_indexonlyscan = off; "
WALK = "explain (verbose, format json) select 1 from {relation}{where} order by {columns} limit 1"
READS_ALL = {"Seq Scan", "Bitmap Heap Scan", "Sort", "Incremental Sort", "Foreign Scan"}


def is_walked(relation: Relation, index: Index) -> bool:
    """Return whether an index yields the rows in the order of *index*, without reading others."""
    return READS_ALL.isdisjoint(node["Node Type"] for node in _plan(OFF, relation, index))


def below(relation: Relation, index: Index) -> Index | None:
    """Return the index on the table below a view, None if the view has several tables."""
    nodes = list(_plan(READ_ALL, relation, index))
    scans = [node for node in nodes if "Alias" in node]
    keys = next((node["Sort Key"] for node in nodes if "Sort Key" in node), None)
    if keys is None or len({node["Alias"].rstrip("_0123456789") for node in scans}) != 1:
        return None
    aliases = {name for node in scans for name in (node["Alias"], node["Alias"].rstrip("_0123456789"))}
    columns, where = ", ".join(keys), scans[0].get("Filter")
    for alias in sorted(aliases, key=len, reverse=True):
        columns, where = columns.replace(f"{alias}.", ""), where and where.replace(f"{alias}.", "")
    return Index(columns, where)


def _plan(settings: str, relation: Relation, index: Index) -> Iterator[dict[str, Any]]:
    explain = WALK.format(relation=relation.sql, where=index.condition, columns=index.columns)
    with database.atomic() as transaction:
        ((plans,),) = database.execute_sql((settings + explain).replace("%", "%%")).fetchall()
        transaction.rollback()
    return _nodes(plans[0]["Plan"])


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for part in node.get("Plans", ()):
        yield from _nodes(part)
