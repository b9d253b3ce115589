"""The artifacts that were destroyed, as the audit has them, and those of them whose objects are still there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from forgekeeper import Recoverable
from forgekeeper.audit.deletions import each_of
from forgekeeper.platform.database import database
from forgekeeper.platform.database.queries import pages
from forgekeeper.platform.settings import Settings
from forgekeeper.sources.outbox import DeletedObject
from workers.expired_job_artifacts.restoring import Row, describe_obstacle, read_row

RECORD = "expired_artifact"
OBJECT = "deleted_object"
"""What objects of the outbox are called in the audit."""
LINES = 50
"""So many rows of the audit are read at once, each of a hundred artifacts."""

OF_RUN = "run = %(run)s"
OF_ARTIFACT = "%(artifact)s = any(ids)"
# By so much the clock of an object's row and that of its artifact's line may differ: an hour.
OF_PROJECT = """detail->'project_id' @> to_jsonb(%(project)s::bigint) and at >= (
        select min(created_at) - interval '1 hour' from deleted_objects where project_id = %(project)s
    )"""
DESTROYED = f"""
    select ids, detail from audit_deletions where record = '{RECORD}' and phase = 'done' and {{which}} order by id desc
"""
# Where an attempt died between the store and the outbox, the next one closes its intents: the row is there, and held,
# and the object is gone.
GONE = f"""
    select object.id from audit_deletions, unnest(ids) with ordinality as one (id, place)
    join deleted_objects as object using (id)
    where record = '{OBJECT}' and phase = 'outcome'
      and at >= (select min(created_at) - interval '1 hour' from deleted_objects)
      and coalesce(detail->'state'->>(place::integer - 1), detail->>'state') in ('deleted', 'missing')
"""


class Which(NamedTuple):
    """Whose artifacts and objects: a *project*'s, those that a *run* has destroyed, or one *artifact*'s; else all."""

    project: int | None = None
    run: int | None = None
    artifact: int | None = None

    @property
    def named(self) -> int:
        """How many of these a person has named."""
        return sum(one is not None for one in self)


def count_recoverable(run: int, until: float, _settings: Settings) -> Recoverable:
    """Count the artifacts that *run* has destroyed and that can come back, page by page until that instant."""
    if obstacle := describe_obstacle():
        return Recoverable(0, 0, obstacle)
    count = looked_at = 0
    for rows, lost in pages_of_recoverable(Which(run=run), held=False):
        count, looked_at = count + len(rows), looked_at + len(rows) + lost
        if time.monotonic() >= until:
            break
    return Recoverable(count, looked_at)


def pages_of_destroyed(which: Which) -> Iterator[list[Row]]:
    """Yield pages of the artifacts as they were, the latest first: of one that was destroyed twice, the last row."""
    seen = set[int]()
    of = OF_RUN if which.run is not None else OF_PROJECT if which.project is not None else OF_ARTIFACT
    statement = DESTROYED.format(which=of)
    for page in pages("forgekeeper_lines", statement, which._asdict(), size=LINES):
        rows = list[Row]()
        for ids, detail in page:
            for row in map(read_row, each_of(ids, detail, len(ids))):
                asked = which.project in {None, row["project_id"]} and which.artifact in {None, row["id"]}
                if asked and row["id"] not in seen:
                    seen.add(row["id"])
                    rows.append(row)
        yield rows


def pages_of_recoverable(which: Which, *, held: bool = True) -> Iterator[tuple[list[Row], int]]:
    """Yield pages of the artifacts whose objects are there, or that have none, and how many are lost.

    Of objects that are not *held* a run may delete any at any moment: they count only if *held* is false.
    """
    gone = {number for (number,) in database.execute_sql(GONE).fetchall()}
    for rows in pages_of_destroyed(which):
        there = {path for path, number, is_held in find_objects(rows) if is_held >= held and number not in gone}
        back = [row for row in rows if not row["file_final_path"] or row["file_final_path"] in there]
        yield back, len(rows) - len(back)


def find_objects(rows: Sequence[Row]) -> list[tuple[str, int, bool]]:
    """Return of those whose objects lie in the outbox the path, the object's id, and whether it is held."""
    return DeletedObject.lying([row["file_final_path"] for row in rows if row["file_final_path"]])
