"""Delete the objects whose artifacts are gone: the outbox of batch 11.

An object that a live artifact still names stays, and its row is removed.  If an artifact without a path may have the
object, the row stays, too: like that of an object that cannot be deleted it is tried ten times, and then is in
quarantine for a person.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from forgekeeper import Locations, NamedBy, Objects, Queue, Retry, batch
from forgekeeper.platform.database import survey
from forgekeeper.sources.outbox import LOCATIONS, MAX_ATTEMPTS, DeletedObject
from models import JobArtifact, PathlessArtifact, ProjectGroup

CHUNK = 1_000
MAX_RUNTIME = timedelta(minutes=4)


@batch(
    cron="* * * * *",
    queue="objects",
    budget=MAX_RUNTIME,
    time_limit=timedelta(minutes=6),
    # By it people exclude groups.
    reads=[ProjectGroup],
    deletes_from="artifacts",
    released_with="expired_job_artifacts",
    collector="objects",
)
def delete_objects(now: datetime) -> Objects[DeletedObject]:
    """Delete the objects of destroyed artifacts."""
    return Objects(
        Queue(
            DeletedObject,
            due_at=DeletedObject.pick_up_at,
            attempts=DeletedObject.attempts,
            created_at=DeletedObject.created_at,
            retry=Retry(first=timedelta(minutes=1), attempts=MAX_ATTEMPTS),
        ),
        location=Locations(DeletedObject.file_store, LOCATIONS),
        path=DeletedObject.full_path(),
        project=DeletedObject.project_id,
        unless=NamedBy(JobArtifact, unsure=PathlessArtifact),
        chunk=CHUNK,
        called="object",
    )


@delete_objects.objects
def known(location: str) -> list[str]:
    """Return where some objects should lie: of live artifacts, and of those that wait to be deleted."""
    codes = [code for code, place in LOCATIONS.items() if place == location]
    paths = {"ci_job_artifacts": "file_final_path", "deleted_objects": "concat_ws('/', nullif(store_dir, ''), file)"}
    there = [(table, f"case file_store when {code} then {path} end") for code in codes for table, path in paths.items()]
    return [path for table, found in there for path in survey.sample(table, "id", found)]
