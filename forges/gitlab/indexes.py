"""Indexes that the batches' statements need and GitLab's tables lack.

They are built concurrently, which cannot run in a transaction; an index of a partitioned table is built partition by
partition.
"""

from __future__ import annotations

from collections.abc import Iterator

from forgekeeper.platform.database import database
from forges.adoption import Adoption
from models import CLASS_EXPRESSION, TRACE_FILE_TYPE, UNLOCKED_STATE

SELECT_LEAF_PARTITIONS = """
    select quote_ident(n.nspname), c.relname
    from pg_class whole, pg_partition_tree(whole.oid) join pg_class c on c.oid = relid
        join pg_namespace n on n.oid = c.relnamespace
    where whole.relnamespace = to_regnamespace(%s) and whole.relname = %s and isleaf
    order by c.relname
"""
SELECT_VALID_INDEX = """
    select true from pg_index join pg_class c on c.oid = indexrelid
    where indisvalid and c.relnamespace = to_regnamespace(%s) and c.relname = %s
"""


def find_missing(found: Adoption, artifacts: str) -> Iterator[str]:
    """Yield statements that build indexes that are missing, or missing in a partition."""
    if "artifacts" not in (part.name for part in found.adopted_parts):
        return
    for name, keys in _list_wanted_indexes(found).items():
        if not database.execute_sql(SELECT_VALID_INDEX, (found.tables, name)).fetchone():
            yield from _write_index_statements(found, artifacts, name, keys)


def _list_wanted_indexes(found: Adoption) -> dict[str, str]:
    # The person who builds the index has another search_path, and each insert executes its functions.
    path, due = found.fill_template("PATH_OF_ROW"), found.fill_template("INSTANT(expire_at)")
    of_class = f"pg_catalog.{CLASS_EXPRESSION}"
    return {
        "forgekeeper_expired": (
            f"({of_class}, {due}, id) where locked = {UNLOCKED_STATE} and file_type <> {TRACE_FILE_TYPE}"
        ),
        "forgekeeper_paths": f"((coalesce(nullif(file_final_path, ''), {path})))",
    }


def _write_index_statements(found: Adoption, artifacts: str, name: str, keys: str) -> Iterator[str]:
    table = f"{found.tables}.{artifacts}"
    parts = database.execute_sql(SELECT_LEAF_PARTITIONS, (found.tables, artifacts)).fetchall()
    if not parts:
        yield f"create index concurrently if not exists {name} on {table} {keys};"
        return
    yield f"create index if not exists {name} on only {table} {keys};"
    for schema, part in parts:
        own = f"{name}_{part}"[:63]
        yield f"create index concurrently if not exists {own} on {schema}.{part} {keys};"
        yield f"alter index {found.tables}.{name} attach partition {schema}.{own};"
