"""An artifact without a path has its object in a folder that its uploader has called by the artifact's or job's id."""

import pytest

from forgekeeper.platform.database import now
from forgekeeper.sources.outbox import DeletedObject, split_path
from models import JobArtifact
from tests.harness.performing import perform
from tests.harness.settings import settings_with
from workers.delete_objects import delete_objects

pytestmark = pytest.mark.usefixtures("database")
JOB = 4711


VIEW = """
    alter table ci_job_artifacts rename to artifacts;
    create view ci_job_artifacts as select * from artifacts;
"""
SAYS_SO = "create view ci_pathless_artifacts as select id, job_id from artifacts where file_final_path is null;"
BACK = """
    drop view if exists ci_pathless_artifacts;
    drop view ci_job_artifacts;
    alter table artifacts rename to ci_job_artifacts;
"""


@pytest.fixture
def view(database):
    """Put a view into the place of the table, with or without saying that paths may be missing."""
    yield lambda more="": database.execute_sql(VIEW + more)
    database.execute_sql(BACK)


def delete(folder, *paths):
    """Put objects at the paths into the store and into the outbox, and delete them."""
    folder.put(*paths)
    due = [dict(zip(("store_dir", "file"), split_path(path), strict=True)) | {"pick_up_at": now()} for path in paths]
    DeletedObject.insert_many(due).execute()
    return perform(delete_objects, settings=settings_with(object_stores={"artifacts": folder.url}))


def test_an_object_in_the_folder_of_an_artifact_without_a_path_is_left_alone(folder):
    number = JobArtifact.create(project_id=1, job_id=JOB, file_type=1, file="a.zip").id
    kept = {f"ab/{number}/a.zip", f"2020_01/1/{JOB}/a.zip"}

    result = delete(folder, *kept, f"ab/{number + 1}/a.zip", f"ab/{JOB}/a.zip")

    assert folder.keys() == kept
    assert (result.deleted, result.kept) == (2, 2)
    assert {(row.path, row.attempts) for row in DeletedObject.select()} == {(path, 1) for path in kept}


@pytest.mark.parametrize(("more", "kept"), [("", 0), (SAYS_SO, 1)])
def test_of_a_view_the_adoption_says_whether_artifacts_may_lack_a_path(folder, view, more, kept):
    number = JobArtifact.create(project_id=1, job_id=JOB, file_type=1, file="a.zip").id
    view(more)

    result = delete(folder, f"7/{number}/1.chunk")

    assert (result.deleted, result.kept, DeletedObject.select().count()) == (1 - kept, kept, kept)
