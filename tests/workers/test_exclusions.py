"""What people exclude of the five documents, and what artifacts are spared by a declaration."""

from datetime import timedelta

import pytest

from forgekeeper.engine.previewing import preview_batch
from forgekeeper.platform.database import now
from forgekeeper.sources.outbox import DeletedObject
from models import JobArtifact
from tests.harness.artifacts import artifact, ids, run, turn_on
from tests.harness.excluding import exclude, relation
from tests.harness.performing import perform
from tests.harness.ref_deletions import list_enqueued_projects, projects
from tests.harness.settings import settings_with
from tests.harness.stale_uploads import HERE, complete, register
from tests.harness.stale_uploads import run as run_uploads
from workers.delete_objects import delete_objects
from workers.expired_job_artifacts import delete_artifact_bucket, expired_job_artifacts

CREATED, RUNNING, PENDING, FINALIZING = 1, 2, 3, 4
"""How far a forge has got with recounting a project's artifacts."""

pytestmark = pytest.mark.usefixtures("database")


def test_an_excluded_project_gets_no_child(parent):
    projects(4)
    exclude("project:2")

    result = parent().result

    assert (result["total_projects"], list_enqueued_projects()) == (3, [1, 3, 4])


def test_objects_of_an_excluded_project_wait_in_the_outbox_as_they_are(folder):
    folder.put("a/1", "a/2")
    instant = now() - timedelta(minutes=1)
    for number in (1, 2):
        DeletedObject.create(project_id=number, store_dir="a", file=str(number), pick_up_at=instant)
    exclusion, settings = exclude("project:1"), settings_with(object_stores={"artifacts": folder.url})

    outcome = perform(delete_objects, settings=settings)

    (waiting,) = DeletedObject.select()
    assert (outcome.deleted, outcome.remaining, waiting.pick_up_at) == (1, 0, instant)
    assert delete_objects.sum_backlogs(now()).records == 0
    exclusion.delete_instance()
    assert perform(delete_objects, settings=settings).deleted == 1


def test_an_upload_that_is_excluded_is_not_claimed_and_can_still_complete(folder):
    register("keep/1", "go/1")
    exclude("pattern:artifacts:keep/*")

    run_uploads(artifacts=folder.url)

    assert complete(HERE, "keep/1")
    assert not complete(HERE, "go/1")


@pytest.mark.parametrize("state", [CREATED, RUNNING, PENDING, FINALIZING])
def test_artifacts_of_a_project_stay_while_its_statistics_are_recounted(state):
    turn_on()
    kept, _ = artifact(project=1), artifact(project=2)
    refreshes = relation(
        "project_build_artifacts_size_refreshes", "project_id bigint, state smallint", (1, state), (3, RUNNING)
    )

    with refreshes:
        shown = preview_batch(expired_job_artifacts, settings_with())
        for _ in range(5):
            run()
        (part,), backlog = shown.parts, delete_artifact_bucket.backlogs["expired_artifact"](now())

    begun = state != CREATED
    assert ids() == ({kept} if begun else set())
    assert (part.records, part.kept, shown.due) == ((1, {"statistics_recounted": 1}, 1) if begun else (2, {}, 2))
    assert backlog.records == 0
    for _ in range(5):
        run()
    assert not JobArtifact.select().exists()
