"""Delete the objects whose artifacts are gone: the outbox of batch 11.

An object that a live artifact still names stays, and its row is removed.  If an artifact without a path may have the
object, the row stays, too: like that of an object that cannot be deleted it is tried ten times, and then is in
quarantine for a person.
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
    # By it people exclude groups.
    reads=[ProjectGroup],
    deletes_from="artifacts",
    released_with="expired_job_artifacts",
    collector="objects",
)
def delete_objects(now: datetime) -> Objects[Any]:
    """Delete the objects of destroyed artifacts."""
    return Outbox.objects(unless=NamedBy(JobArtifact, unsure=PathlessArtifact))
