"""Artifacts that were destroyed wrongly: their objects are held back, and their rows come from the audit (batch 11)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from forgekeeper.audit.intents import at_work
from forgekeeper.database import database
from forgekeeper.storage.outbox import Chosen, DeletedObject
from models import UNLOCKED, JobArtifact, ProjectStatistics

RECORD = "expired_artifact"
OBJECT = "deleted_object"
"""What objects of the outbox are called in the audit."""
STATEMENT = 500
"""So many rows are in a statement."""
BEFORE = timedelta(hours=1)
"""By so much the clock of an object's row and that of its artifact's line may differ."""

COLUMNS = {
    **{name: name for name in ("id", "project_id", "job_id", "partition_id", "file_type", "file_store", "file")},
    "file_final_path": "path",
    "size": "bytes",
    "expire_at": "due",
    "locked": "locked",
    **{name: name for name in ("created_at", "updated_at")},
}
"""The columns of an artifact, and what the audit calls them."""

DESTROYED = """
    select ids, detail from audit_deletions
    where record = %(record)s and phase in ('done', 'outcome') and {which}
    order by id
"""
OF_RUN = "run = %(run)s"
OF_PROJECT = "at >= %(since)s and detail->'project_id' @> to_jsonb(%(project)s::bigint)"


class Held(NamedTuple):
    """What holding has come to: the ids of the objects, and the artifacts by their columns.

    *lost* counts those whose objects are gone; *too_late* the objects that a run is at just now.
    """

    objects: dict[int, str]
    artifacts: list[dict[str, Any]]
    lost: int
    too_late: int


def hold(*, project: int | None = None, run: int | None = None) -> Held:
    """Hold back the objects of a project's artifacts, or of those that a run has destroyed."""
    if run is not None:
        artifacts = _destroyed(OF_RUN, run=run)
        objects = DeletedObject.hold(_at(artifacts))
    else:
        objects = DeletedObject.hold(Chosen(project=project))
        since = _oldest(objects)
        found = _destroyed(OF_PROJECT, project=project, since=since - BEFORE) if since else []
        artifacts = [one for one in found if one["project_id"] == project]
    paths = set(objects.values())
    there = [one for one in artifacts if one["file_final_path"] is None or one["file_final_path"] in paths]
    return Held(objects, there, len(artifacts) - len(there), len(at_work(OBJECT, list(objects))))


def unhold(grace: timedelta, *, project: int | None = None, run: int | None = None) -> int:
    """Let go what was held back of a project, of a run, or altogether: due after *grace*; return how many."""
    which = Chosen(project=project) if run is None else _at(_destroyed(OF_RUN, run=run))
    return DeletedObject.unhold(which, grace=grace)


def statements(artifacts: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the statements that insert the artifacts back, and add their bytes to their projects'."""
    columns = ", ".join(COLUMNS)
    for start in range(0, len(artifacts), STATEMENT):
        rows = ",\n        ".join(_quoted(list(one.values())) for one in artifacts[start : start + STATEMENT])
        yield f"""\
with back as (
    insert into {JobArtifact._meta.table_name} ({columns})
    overriding system value values
        {rows}
    on conflict (id) do nothing
    returning project_id, size
)
update {ProjectStatistics._meta.table_name} as total
set build_artifacts_size = total.build_artifacts_size + came.size
from (select project_id, sum(coalesce(size, 0)) as size from back group by project_id) as came
where total.project_id = came.project_id;"""


def _destroyed(which: str, **values: Any) -> list[dict[str, Any]]:
    """Return artifacts that were destroyed, by their columns; of one that came back in between what it was last."""
    found: dict[int, dict[str, Any]] = {}
    rows = database.execute_sql(DESTROYED.format(which=which), {**values, "record": RECORD}).fetchall()
    for ids, detail in rows:
        facts = {"locked": UNLOCKED, **detail, "id": list(ids)}
        for place in range(len(ids)):
            one = {column: _value(facts[name], place) for column, name in COLUMNS.items()}
            found[one["id"]] = one
    return list(found.values())


def _value(column: Any, place: int) -> Any:
    return column[place] if isinstance(column, list) else column


def _at(artifacts: Sequence[dict[str, Any]]) -> Chosen:
    return Chosen(paths=[one["file_final_path"] for one in artifacts if one["file_final_path"] is not None])


def _oldest(objects: dict[int, str]) -> datetime | None:
    """Return since when the first of the objects is in the outbox."""
    rows = DeletedObject.select(DeletedObject.created_at).where(DeletedObject.id.in_(list(objects)))
    return min((row.created_at for row in rows), default=None) if objects else None


def _quoted(values: Sequence[Any]) -> str:
    """Write values as SQL does."""
    with database.cursor() as cursor:
        written: bytes = cursor.mogrify(f"({', '.join(['%s'] * len(values))})", list(values))
    return written.decode()
