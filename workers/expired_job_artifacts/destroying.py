"""Expired artifacts, and what goes with them in one statement: objects into the outbox, bytes off the statistics."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

import peewee as pw

from forgekeeper import Rows, Total
from models import CLASS, CLASSES, JobArtifact, ProjectStatistics

BATCH_SIZE = 100
RECORD = "expired_artifact"
"""What an artifact is called in the audit, and when it is bad."""

# What has neither a final path nor a file has no object to record.  What has a file alone does not go
# (`models.NO_PATH`).
OUTBOX = """
    insert into ci_deleted_objects (project_id, file_store, store_dir, file, pick_up_at)
    -- "/a" must not come out as "a": that would be another object.
    select project_id, file_store, coalesce(folder, ''), case when folder = '' then file_final_path else last end,
        %s::timestamptz
    from deleted,
        lateral (select split_part(file_final_path, '/', -1) as last offset 0) as name,
        lateral (
            select left(file_final_path, greatest(0, length(file_final_path) - length(last) - 1)) as folder offset 0
        ) as place
    where file_final_path <> ''
"""
AUDITED = {
    **{name: name for name in ("project_id", "job_id", "partition_id", "file_type", "file_store", "file")},
    "bytes": "size",
    "path": "file_final_path",
    "created_at": "created_at",
    "updated_at": "updated_at",
}
"""What the audit says of an artifact besides its id and when it was due: its row, so that it can be inserted back."""
EVERY_CLASS = pw.SQL(f"{CLASS} = any(%s)", [list(range(CLASSES))])
"""Met by all; so PostgreSQL looks into the index that begins with the class."""


def expired(
    now: datetime,
    number: int | None = None,
    *,
    grace: timedelta = timedelta(0),
    until: Callable[[], str | None] | None = None,
) -> Rows[JobArtifact]:
    """Return the expired artifacts of class *number*, or of all; their objects are due after the *grace*."""
    return Rows(
        JobArtifact,
        JobArtifact.is_expired(now),
        share=EVERY_CLASS if number is None else JobArtifact.in_class(number),
        since=JobArtifact.expire_at,
        chunk=BATCH_SIZE,
        record=RECORD,
        counted="destroyed",
        counted_bytes="bytes",
        name=JobArtifact.file_final_path,
        audit=AUDITED,
        project=JobArtifact.project_id,
        size=JobArtifact.size,
        also=[pw.SQL(OUTBOX, [now + grace])],
        total=Total(ProjectStatistics.build_artifacts_size, of=JobArtifact.project_id),
        until=until,
    )
