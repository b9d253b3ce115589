"""The SQL that inserts destroyed artifacts back, from what the audit has of them.

Into a table rows are inserted with all of their columns.  Below a view only its forge knows what a row is: there a
function of the forge's, `restore_artifacts`, inserts them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from peewee import chunked
from psycopg2.sql import Identifier

from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database
from forgekeeper.platform.database.exclusions import visible
from models import UNLOCKED, ProjectStatistics

AUDITED = {
    **{name: name for name in ("project_id", "job_id", "partition_id", "file_type", "file_store", "file", "locked")},
    "bytes": "size",
    "path": "file_final_path",
    "created_at": "created_at",
    "updated_at": "updated_at",
}
"""The row of an artifact in the audit, beside its id and its due time: by it the artifact can be inserted back."""
STATEMENT_ROWS = 500
COLUMNS = {"id": "id", "expire_at": "due", **{column: name for name, column in AUDITED.items()}}
"""The columns of an artifact that every forge has, and what the audit calls them."""

# It means the same whatever the session's settings are: no name of an object leaves its literal.
BEGIN = ("begin;", "set local standard_conforming_strings = on;", "set local client_encoding = 'UTF8';")
INSERT = """\
with back as (
    insert into {relation} ({columns}) overriding system value
    select {columns} from jsonb_populate_recordset(null::{relation}, {rows}::jsonb)
    on conflict (id) do nothing
    returning project_id, size
)"""
INSERT_WITH_TOTALS = f"""\
{INSERT}
update project_statistics as total
set build_artifacts_size = total.build_artifacts_size + came.size
from (select project_id, sum(coalesce(size, 0)) as size from back group by project_id) as came
where total.project_id = came.project_id;"""
INSERT_ALONE = f"{INSERT} select from back;"
RESTORE = "select {schema}.restore_artifacts({rows}::jsonb);"
FIND_RELATION = """
    select relkind in ('r', 'p'), quote_ident(nspname), quote_ident(nspname) || '.' || quote_ident(relname),
        to_regprocedure(quote_ident(nspname) || '.restore_artifacts(jsonb)') is not null
    from pg_class as c join pg_namespace as n on n.oid = relnamespace where c.oid = to_regclass('ci_job_artifacts')
"""

Row = dict[str, Any]


def describe_obstacle() -> str | None:
    """Say why artifacts that are destroyed cannot be restored; None if nothing prevents it."""
    found = database.execute_sql(FIND_RELATION).fetchone()
    if found is None:
        return None
    is_table, schema, relation, is_restorable = found
    if client.settings is not None and client.settings.objects == "theirs":
        why = "FORGEKEEPER_OBJECTS is theirs, so the forge deletes their objects, and nothing here keeps it from that"
    elif is_table or is_restorable:
        return None
    else:
        why = f"{relation} is a view, and no function {schema}.restore_artifacts(jsonb) inserts rows (docs/adopting.md)"
    return f"artifacts that are destroyed cannot be restored: {why}"


def read_row(facts: Mapping[str, Any]) -> Row:
    """Return a row of the relation by its columns, from what the audit has of it."""
    # Once all that went was unlocked, and the audit did not say so.
    known = {"locked": UNLOCKED, **facts}
    row = {column: known[name] for column, name in COLUMNS.items()}
    return row | dict(facts.get("others", {}))


def write_script(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the SQL that inserts artifacts back, in one transaction, and adds their bytes to their projects'."""
    is_table, schema, relation, _ = database.execute_sql(FIND_RELATION).fetchone()
    into_table = INSERT_WITH_TOTALS if visible(ProjectStatistics) else INSERT_ALONE
    template = into_table if is_table else RESTORE
    yield from BEGIN
    (path,) = database.execute_sql("select current_setting('search_path')").fetchone()
    yield f"set local search_path = {path};"
    with database.connection().cursor() as cursor:
        for columns, alike in groupby(rows, tuple):
            names = ", ".join(Identifier(column).as_string(cursor) for column in columns)
            for some in chunked(alike, STATEMENT_ROWS):
                text = cursor.mogrify("%s", (json.dumps(some, ensure_ascii=False),)).decode()
                yield template.format(relation=relation, schema=schema, columns=names, rows=text)
    yield "commit;"
