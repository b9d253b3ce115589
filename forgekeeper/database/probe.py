"""A few of the objects that a table names, from all over it: what must be found in their store."""

from __future__ import annotations

from forgekeeper.database import database

SIZE = 20
# Points all over the keys, and the row behind each: a large table is not read through.
SAMPLE = """
    with span as (
        select min({key}) as low, max({key}) as high from {table}
    ), points as materialized (
        select floor(low + random()::numeric * (high::numeric - low + 1))::bigint as point
        from span, generate_series(1, %(size)s)
    )
    select distinct path from points, lateral (
        select {path} as path from {table} where {key} >= point order by {key} limit 1
    ) as found
    where path <> ''
"""


def sample(table: str, key: str, path: str) -> list[str]:
    """Return what the expression *path* is in some rows of *table*, which has the numeric *key*."""
    statement = SAMPLE.format(table=table, key=key, path=path)
    return [row[0] for row in database.execute_sql(statement, {"size": SIZE}).fetchall()]
