"""An artifact without a path has its object in a folder that its uploader has called by the artifact's or job's id."""

import pytest

from forgekeeper.database import now
from forgekeeper.storage.outbox import DeletedObject, parted
from models import JobArtifact
from tests.harness.performing import perform
from tests.harness.settings import settings_with
from workers.delete_objects import delete_objects

pytestmark = pytest.mark.usefixtures("database")
JOB = 4711


def test_an_object_in_the_folder_of_an_artifact_without_a_path_is_left_alone(folder):
    number = JobArtifact.create(project_id=1, job_id=JOB, file_type=1, file="a.zip").id
    kept = {f"ab/{number}/a.zip", f"2020_01/1/{JOB}/a.zip"}
    paths = [*kept, f"ab/{number + 1}/a.zip", f"ab/{JOB}/a.zip"]
    folder.put(*paths)
    due = [dict(zip(("store_dir", "file"), parted(path), strict=True)) | {"pick_up_at": now()} for path in paths]
    DeletedObject.insert_many(due).execute()

    perform(delete_objects, settings=settings_with(object_stores={"artifacts": folder.url}))

    assert folder.keys() == kept
