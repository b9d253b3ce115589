"""Delete uploads that began three hours ago and never completed (batch 100).

A producer registers each upload before it begins (docs/uploads.md).  Entries older than three hours are due, the oldest
first, by Redis's clock.  An object that a live artifact names stays, and its entry is removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from forgekeeper import NamedBy, Objects, Producer, Register, Retry, Threshold, batch
from models import JobArtifact, PathlessArtifact

MAX_UPLOAD_DURATION = timedelta(hours=3)
MAX_EXEC_DURATION = timedelta(seconds=250)
ENTRIES_PER_CHUNK = 1_000
UPLOADS_REGISTER = Register(
    "pending_direct_uploads",
    older_than=MAX_UPLOAD_DURATION,
    # The first pause ends with the next run.
    retry=Retry(first=timedelta(minutes=6), attempts=5),
)


@dataclass
class StaleUploadsResult:
    """The result of a run, in the document's words; it grows with each chunk."""

    total_pending_entries: int = 0
    total_deleted_stale_entries: int = 0
    execution_timeout: bool = False
    failed_entries: int = 0


@batch(
    document=100,
    cron="*/6 * * * *",
    budget=MAX_EXEC_DURATION,
    time_limit=timedelta(minutes=6),
    outcome=StaleUploadsResult,
    # The lookup of an object's artifacts includes artifacts without a path.
    reads=[PathlessArtifact],
    thresholds=[
        Threshold("duration", above=250),
        Threshold("consecutive_failures", above=2),
        Threshold("backlog", above=10_000, found=("total_pending_entries",), done=("total_deleted_stale_entries",)),
    ],
    collector="uploads",
)
def stale_direct_uploads(now: datetime) -> Objects[Register]:
    """Delete uploads that began three hours ago and never completed.

    Raises `StoreUnavailable` when stores did not answer, after everything at the others was done.
    """
    return Objects(
        UPLOADS_REGISTER,
        unless=NamedBy(JobArtifact),
        chunk=ENTRIES_PER_CHUNK,
        counted={
            "pending": "total_pending_entries",
            "deleted": "total_deleted_stale_entries",
            "timed_out": "execution_timeout",
            "failed": "failed_entries",
        },
    )


producer = Producer(stale_direct_uploads)
"""The interface for producers in Python: `from workers.stale_direct_uploads import producer`."""
