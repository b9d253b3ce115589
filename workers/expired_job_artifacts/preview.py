"""What the children of batch 11 would destroy, and which expired artifacts stay."""

from __future__ import annotations

from collections.abc import Iterator

from forgekeeper.database import database, survey
from forgekeeper.database.survey import Rows, held
from forgekeeper.declaring.preview import Look, Part
from models import CLASS, CLASSES, MAY_GO, WAITS

PAST = "expire_at < %(now)s"
DUE = f"{PAST} and {MAY_GO}"
KEPT = {"trace": "file_type = 3", "locked": "file_type <> 3 and locked = 1", **WAITS}
"""Why an expired artifact stays: it is a trace, it is locked, or the forge says too little of it."""
STATISTICS_BUSY = "statistics_busy"
BUSY_STATISTICS = "select array(select project_id from project_statistics where {held})"
NAME = "nullif(file_final_path, '')"


def artifacts(look: Look) -> Iterator[Part]:
    """Count the artifacts that would be destroyed, all buckets together, with their bytes and by project.

    Those of projects whose statistics another session has locked are left for later.
    """
    part, table = look.part("expired_artifact"), "ci_job_artifacts"
    statement = BUSY_STATISTICS.format(held=held("project_statistics"))
    locked_projects = survey.within(look.share(0.1), lambda: database.execute_sql(statement).fetchone()[0]) or []
    values = {"now": look.now, "classes": list(range(CLASSES)), "locked_projects": locked_projects}
    due = DUE + (" and project_id <> all(%(locked_projects)s)" if locked_projects else "")
    every_class = f"{CLASS} = any(%(classes)s) and {due}"
    columns = {"due": "expire_at", "name": NAME, "project": "project_id", "size": "coalesce(size, 0)"}
    look.count(part, Rows(table, every_class, values, rough=due, **columns), share=0.7)
    if locked_projects:
        stays = {STATISTICS_BUSY: "project_id = any(%(locked_projects)s)"}
        look.keep(part, Rows(table, DUE, values, due="expire_at"), stays, share=0.3)
    look.keep(part, Rows(table, f"{PAST} and ({MAY_GO}) is not true", values, due="expire_at"), KEPT)
    yield part
