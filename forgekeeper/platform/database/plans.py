"""Checks by the plan whether PostgreSQL uses a needed index; nothing is executed.

This works for views and partitions, too: the plan shows the tables below.  The size of the tables does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forgekeeper.platform.database import database
from forgekeeper.platform.database.relations import Index, Relation

DISABLE_SCANS = "".join(
    f"set local enable_{what} = off; " for what in ("seqscan", "bitmapscan", "sort", "incremental_sort")
)
# Without indexes the plan names every column and condition that an index would need.
DISABLE_INDEXES = DISABLE_SCANS + "set local enable_indexscan = off; set local enable_indexonlyscan = off; "
EXPLAIN_WALK = "explain (verbose, format json) select 1 from {relation}{where} order by {columns} limit 1"
FULL_SCAN_NODES = {"Seq Scan", "Bitmap Heap Scan", "Sort", "Incremental Sort", "Foreign Scan"}


def is_index_walked(relation: Relation, index: Index) -> bool:
    """Return whether an index yields the rows in the order of *index*, without reading others."""
    return FULL_SCAN_NODES.isdisjoint(node["Node Type"] for node in _explain_walk(DISABLE_SCANS, relation, index))


def find_index_below(relation: Relation, index: Index) -> Index | None:
    """Return the index on the table below a view, None if the view has several tables."""
    nodes = list(_explain_walk(DISABLE_INDEXES, relation, index))
    scans = [node for node in nodes if "Alias" in node]
    keys = next((node["Sort Key"] for node in nodes if "Sort Key" in node), None)
    if keys is None or len({node["Alias"].rstrip("_0123456789") for node in scans}) != 1:
        return None
    aliases = {name for node in scans for name in (node["Alias"], node["Alias"].rstrip("_0123456789"))}
    columns, where = ", ".join(keys), scans[0].get("Filter")
    for alias in sorted(aliases, key=len, reverse=True):
        columns, where = columns.replace(f"{alias}.", ""), where and where.replace(f"{alias}.", "")
    return Index(columns, where)


def _explain_walk(settings: str, relation: Relation, index: Index) -> Iterator[dict[str, Any]]:
    explain = EXPLAIN_WALK.format(relation=relation.sql, where=index.where_clause, columns=index.columns)
    with database.atomic() as transaction:
        ((plans,),) = database.execute_sql((settings + explain).replace("%", "%%")).fetchall()
        transaction.rollback()
    return _iterate_nodes(plans[0]["Plan"])


def _iterate_nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for part in node.get("Plans", ()):
        yield from _iterate_nodes(part)
