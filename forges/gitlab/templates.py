"""The SQL that makes the views of GitLab's tables, and its version, which a comment on their schema keeps."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from importlib.resources import files

BEFORE_PARTS, AFTER_PARTS = ("paths", "refusal"), ("deletions",)
"""What is made before and after the parts that are adopted."""
DROP_VIEWS, RECORD_VIEWS, GRANT_AGAIN = "drop_views", "changed_views", "grant_again"
"""What drops all views, and in the end records their definitions, and grants what was granted on them."""
RECORDS_TEMPLATE = "loose_foreign_keys"
"""What is made for each table that says what was deleted."""
# In the view and in the function of artifacts, for each table whose rows PostgreSQL deletes with them.
FOLLOWERS_OF_ROW = """
    (
        select jsonb_agg(to_jsonb(follower)) from {tables}.{table} as follower
        where follower.{column} = artifact.id and follower.partition_id = artifact.partition_id
    ) as {table}"""
RESTORE_FOLLOWERS = """
        insert into {tables}.{table}
        select follower.* from pg_catalog.jsonb_populate_recordset(
            null::{tables}.{table}, nullif(destroyed->'{table}', 'null')
        ) as follower;"""


def read_template(part: str) -> str:
    """Return the SQL of a part: TABLES, VIEWS and the like stand for names."""
    return (files(__package__) / "sql" / f"{part}.sql").read_text(encoding="utf-8")


@cache
def comment_of_version() -> str:
    """Return the comment on the schema of views that this version makes."""
    every = sorted(path.name.removesuffix(".sql") for path in (files(__package__) / "sql").iterdir())
    text = "".join((*map(read_template, every), FOLLOWERS_OF_ROW, RESTORE_FOLLOWERS))
    return f"made by forgekeeper adopt gitlab, {sha256(text.encode()).hexdigest()[:16]}"
