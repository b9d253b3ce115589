"""Deleted rows, as the audit has them, and deleted rows whose objects still exist."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from forgekeeper.api.answers import Recoverable
from forgekeeper.api.batches import BATCHES
from forgekeeper.audit.deletions import expand_records
from forgekeeper.engine.restoring import RestorableRows, RestoredRow
from forgekeeper.platform.database import database
from forgekeeper.platform.database.queries import fetch_pages
from forgekeeper.platform.database.survey import inline_values
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.outbox import DeletedObject

OUTBOX_OBJECT_RECORD = "deleted_object"
"""The record of the outbox's objects in the audit."""
AUDIT_LINES_PER_PAGE = 50
"""Lines of the audit per page, each of a hundred rows."""

WHERE_RUN_MATCHES = "run = %(run)s"
WHERE_ROW_MATCHES = "%(row)s = any(ids)"
# The clocks of an object's row and of the audit's line may differ by an hour.
WHERE_PROJECT_MATCHES = """detail->{name} @> to_jsonb(%(project)s::bigint) and at >= (
        select min(created_at) - interval '1 hour' from deleted_objects where project_id = %(project)s
    )"""
SELECT_DELETED_ROWS = (
    "select ids, detail from audit_deletions where record = {record} and phase = 'done' and {which} order by id desc"
)
# If an attempt died between the store and the outbox, the next one closes its intents: the row exists, and is
# held, and the object is deleted.
SELECT_DELETED_OBJECT_IDS = f"""
    select object.id from audit_deletions, unnest(ids) with ordinality as one (id, place)
    join deleted_objects as object using (id)
    where record = '{OUTBOX_OBJECT_RECORD}' and phase = 'outcome'
      and at >= (select min(created_at) - interval '1 hour' from deleted_objects)
      and coalesce(detail->'state'->>(place::integer - 1), detail->>'state') in ('deleted', 'missing')
"""


class RestoreSelection(NamedTuple):
    """Rows and objects of a *project*, of a *run* that has deleted them, or of the one *row* that is *called* so."""

    project: int | None = None
    run: int | None = None
    row: int | None = None
    row_kind: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is named."""
        return self.project is None and self.run is None and self.row is None

    def includes_kind(self, kind: RestorableRows) -> bool:
        """Return whether rows of this kind may be meant."""
        return self.row_kind in {None, kind.called}


def list_restorable_kinds() -> list[tuple[RestorableRows, str]]:
    """Return the kinds of rows that can be restored, each with the name of its batch."""
    return [(RestorableRows(rows), batch.name) for batch in BATCHES.values() for rows in batch.restorable]


def count_recoverable(kind: RestorableRows, run: int, until: float, _settings: Settings) -> Recoverable:
    """Count the rows that *run* has deleted and that can be restored, page by page until that instant."""
    if obstacle := kind.describe_obstacle():
        return Recoverable(0, 0, obstacle)
    count = looked_at = 0
    for rows, lost in read_recoverable_pages(kind, RestoreSelection(run=run), held=False):
        count, looked_at = count + len(rows), looked_at + len(rows) + lost
        if time.monotonic() >= until:
            break
    return Recoverable(count, looked_at)


def read_deleted_pages(kind: RestorableRows, which: RestoreSelection) -> Iterator[list[RestoredRow]]:
    """Yield pages of the rows as they were, the latest first: of a row that was deleted twice, the last one."""
    seen = set[int]()
    statement = SELECT_DELETED_ROWS.format(
        record=inline_values("%s", [kind.record]), which=_choose_condition(kind, which)
    )
    for page in fetch_pages("forgekeeper_lines", statement, which._asdict(), size=AUDIT_LINES_PER_PAGE):
        rows = list[RestoredRow]()
        for ids, detail in page:
            for row in map(kind.read_row, expand_records(ids, detail, len(ids))):
                project = None if kind.project is None else row[kind.project]
                asked = which.project in {None, project} and which.row in {None, row[kind.key]}
                if asked and row[kind.key] not in seen:
                    seen.add(row[kind.key])
                    rows.append(row)
        yield rows


def _choose_condition(kind: RestorableRows, which: RestoreSelection) -> str:
    """Return the condition of the audit's lines that may have such rows."""
    if which.run is not None:
        return WHERE_RUN_MATCHES
    if which.project is None:
        return WHERE_ROW_MATCHES
    if kind.project is None:
        return "false"
    return WHERE_PROJECT_MATCHES.format(name=inline_values("%s", [kind.columns[kind.project]]))


def read_recoverable_pages(
    kind: RestorableRows, which: RestoreSelection, *, held: bool = True
) -> Iterator[tuple[list[RestoredRow], int]]:
    """Yield pages of rows whose objects exist or that name none, and the number of lost rows.

    A run may delete any object that is not *held* at any moment: these count only if *held* is false.
    """
    gone = {number for (number,) in database.execute_sql(SELECT_DELETED_OBJECT_IDS).fetchall()}
    for rows in read_deleted_pages(kind, which):
        there = {
            path for path, number, is_held in find_outbox_objects(kind, rows) if is_held >= held and number not in gone
        }
        back = [row for row in rows if not row[kind.path] or row[kind.path] in there]
        yield back, len(rows) - len(back)


def find_outbox_objects(kind: RestorableRows, rows: Sequence[RestoredRow]) -> list[tuple[str, int, bool]]:
    """Return, of the rows whose objects are in the outbox, the path, the object's id, and whether it is held."""
    return DeletedObject.find_at_paths([row[kind.path] for row in rows if row[kind.path]])
