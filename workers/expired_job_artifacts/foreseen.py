"""What the children of batch 11 would destroy, and what stays though its time has come."""

from __future__ import annotations

from collections.abc import Iterator

from forgekeeper.database import database
from forgekeeper.database.survey import Rows, held
from forgekeeper.preview import Look, Part
from workers.expired_job_artifacts.destroying import CLASSES, MAY_GO, OF_CLASS, PAST

LOCKED, TRACE, UNKNOWN = "locked", "trace", "unknown"
KEPT = {
    TRACE: "file_type = 3",
    LOCKED: "file_type <> 3 and locked = 1",
    UNKNOWN: "file_type <> 3 and locked <> 1",
}
"""Why an artifact stays whose time has come: it is a trace, it is locked, or nobody can say whether it is."""
STATISTICS_BUSY = "statistics_busy"
BUSY_STATISTICS = "select array(select project_id from project_statistics where {held})"
NAME = "coalesce(nullif(file_final_path, ''), file)"


def foreseen(look: Look) -> Iterator[Part]:
    """Count the artifacts that would be destroyed, all buckets together, with their bytes and by project.

    Those of projects whose statistics another session has locked are left for later.
    """
    part = look.part("expired_artifact")
    ((held_up,),) = database.execute_sql(BUSY_STATISTICS.format(held=held("project_statistics"))).fetchall()
    base = {"now": look.now, "held_up": held_up}
    free = OF_CLASS + (" and project_id <> all(%(held_up)s)" if held_up else "")
    columns = {"due": "expire_at", "name": NAME, "project": "project_id", "size": "coalesce(size, 0)"}
    rows = [Rows("ci_job_artifacts", free, base | {"class": number}, **columns) for number in range(CLASSES)]
    look.count(part, *rows, share=0.7)
    if held_up:
        stays = {STATISTICS_BUSY: "project_id = any(%(held_up)s)"}
        look.keep(part, Rows("ci_job_artifacts", f"{PAST} and {MAY_GO}", base, due="expire_at"), stays, share=0.3)
    look.keep(part, Rows("ci_job_artifacts", f"{PAST} and not ({MAY_GO})", base, due="expire_at"), KEPT)
    yield part
