"""The producer's way in: a path that anybody names is refused."""

import pytest

from coordination.uploads import BeingDeleted
from models import DeletedObject, JobArtifact
from workers import direct_uploads as uploads
from workers.clients import client

PATH = "ab/sample:1.zip"


@pytest.fixture(autouse=True)
def servers(database):
    """Work on real servers."""


def test_a_path_that_nobody_names_is_registered():
    uploads.prepare(client, "artifacts", PATH)

    assert uploads.exists(client, "artifacts", PATH)


def test_a_path_that_a_live_artifact_names_is_refused():
    JobArtifact.create(project_id=1, job_id=1, file_type=1, file_final_path=PATH)

    with pytest.raises(uploads.PathTaken):
        uploads.prepare(client, "artifacts", PATH)


def test_a_path_that_the_outbox_names_is_refused():
    DeletedObject.create(store_dir="ab", file="sample:1.zip")

    with pytest.raises(uploads.PathTaken):
        uploads.prepare(client, "artifacts", PATH)


def test_an_artifact_s_path_is_free_in_another_store():
    JobArtifact.create(project_id=1, job_id=1, file_type=1, file_final_path=PATH)

    uploads.prepare(client, "packages", PATH)

    assert uploads.pending_only(client, "packages", [PATH]) == [PATH]


def test_a_path_that_is_being_deleted_is_refused():
    client.zadd("{pending_direct_uploads}:deleting", {f"artifacts:{PATH}": 0})

    with pytest.raises(BeingDeleted):
        uploads.prepare(client, "artifacts", PATH)
