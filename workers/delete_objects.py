"""Delete the objects of deleted artifacts: the outbox of batch 11.

If a live artifact still names an object, the object is kept and its row removed.  If an artifact without a path may
have the object, the row is kept, too.  As with an object that cannot be deleted, the row is tried ten times, and then
waits in quarantine for a person.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from forgekeeper import NamedBy, Objects, Outbox, batch
from models import JobArtifact, PathlessArtifact, ProjectGroup


@batch(
    cron="* * * * *",
    queue="objects",
    budget=timedelta(minutes=4),
    time_limit=timedelta(minutes=6),
    # Exclusions of groups read it.
    reads=[ProjectGroup],
    deletes_from="artifacts",
    released_with="expired_job_artifacts",
    collector="objects",
)
def delete_objects(now: datetime) -> Objects[Any]:
    """Delete the objects of destroyed artifacts."""
    return Outbox.objects(unless=NamedBy(JobArtifact, unsure=PathlessArtifact))
