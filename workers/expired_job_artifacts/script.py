"""The SQL that inserts artifacts back: a script for the owner of the forge's tables (batch 11).

It means the same whatever the session's settings are: no name of an object leaves its literal.  All or nothing: in one
transaction, which counts its rows as they come.  A part that is executed outside of it fails, and so does the end where
a part is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from peewee import chunked

from forgekeeper.database import database
from models import JobArtifact, ProjectStatistics

STATEMENT = 500
"""Rows in a statement."""
BEGIN = (
    "begin;",
    "set local standard_conforming_strings = on;",
    "set local client_encoding = 'UTF8';",
    "set local forgekeeper.rows = '0';",
)
# The count is in a condition that names no row: it is looked at once, before any row is.
PART = """\
with back as (
    insert into {artifacts} ({columns})
    overriding system value values
        {rows}
    on conflict (id) do nothing
    returning project_id, size
)
update {statistics} as total
set build_artifacts_size = total.build_artifacts_size + came.size
from (select project_id, sum(coalesce(size, 0)) as size from back group by project_id) as came
where total.project_id = came.project_id
  and (
    select set_config('forgekeeper.rows', (current_setting('forgekeeper.rows')::bigint + {count})::text, true)
  ) <> '';"""
# In one line: a script that loses its end loses the commit, too.
END = (
    "do $$ begin if current_setting('forgekeeper.rows') <> '{count}' then"
    " raise exception using message = 'parts of the script are missing, nothing is inserted: of {count} rows came '"
    " || current_setting('forgekeeper.rows'); end if; end $$; commit;"
)


def statements(pages: Iterable[Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """Yield the script: the beginning, the artifacts, their bytes added to their projects', and the end."""
    yield from BEGIN
    count = 0
    for rows in chunked((row for page in pages for row in page), STATEMENT):
        count += len(rows)
        yield PART.format(
            artifacts=JobArtifact._meta.table_name,
            statistics=ProjectStatistics._meta.table_name,
            columns=", ".join(rows[0]),
            rows=",\n        ".join(map(_values, rows)),
            count=len(rows),
        )
    yield END.format(count=count)


def _values(row: Mapping[str, Any]) -> str:
    with database.connection().cursor() as cursor:
        values: bytes = cursor.mogrify("%s", (tuple(row.values()),))
    return values.decode()
