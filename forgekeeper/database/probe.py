"""A few of the objects that the database names, from all over its tables: what must be found in their store."""

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


def objects() -> list[str]:
    """Return where some objects should lie: of live artifacts, and of those that wait to be deleted."""
    outbox = _sample("ci_deleted_objects", "id", "concat_ws('/', nullif(store_dir, ''), file)")
    return [*_sample("ci_job_artifacts", "id", "file_final_path"), *outbox]


def _sample(table: str, key: str, path: str) -> list[str]:
    statement = SAMPLE.format(table=table, key=key, path=path)
    return [row[0] for row in database.execute_sql(statement, {"size": SIZE}).fetchall()]
