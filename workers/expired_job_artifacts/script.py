"""The SQL that inserts artifacts back: a script for the owner of the forge's tables (batch 11).

It is ASCII, and read alike whatever the session's settings are: nothing that an object is called leaves its literal.
All or nothing: in one transaction, which counts its rows as they come.  A part that is executed outside of it fails,
and so does the end where a part is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from models import JobArtifact, ProjectStatistics

STATEMENT = 500
"""So many rows are in a statement."""
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
# In one line: who loses its end loses the commit, too.
END = (
    "do $$ begin if current_setting('forgekeeper.rows') <> '{count}' then"
    " raise exception using message = 'parts of the script are missing, nothing is inserted: of {count} rows came '"
    " || current_setting('forgekeeper.rows'); end if; end $$; commit;"
)
PLAIN = re.compile(r"[ -\[\]-~]*")


def statements(pages: Iterable[Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """Yield the script: the beginning, the artifacts, their bytes added to their projects', and the end."""
    yield from BEGIN
    count, rows = 0, list[str]()
    for page in pages:
        for row in page:
            rows.append(f"({', '.join(map(literal, row.values()))})")
            if len(rows) == STATEMENT:
                yield _part(row, rows)
                count, rows = count + len(rows), []
    if rows:
        yield _part(row, rows)
    yield END.format(count=count + len(rows))


def literal(value: str | int | None) -> str:
    """Write a value as SQL does, in ASCII; no session's settings make it another, or longer."""
    if value is None:
        return "null"
    if isinstance(value, int):
        return str(value)
    text = value.replace("'", "''")
    return f"'{text}'" if PLAIN.fullmatch(text) else f"E'{''.join(map(_escaped, text))}'"


def _escaped(character: str) -> str:
    if PLAIN.fullmatch(character):
        return character
    code = ord(character)
    return "\\\\" if character == "\\" else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _part(row: Mapping[str, Any], rows: Sequence[str]) -> str:
    return PART.format(
        artifacts=JobArtifact._meta.table_name,
        statistics=ProjectStatistics._meta.table_name,
        columns=", ".join(row),
        rows=",\n        ".join(rows),
        count=len(rows),
    )
