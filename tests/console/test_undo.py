"""The page *Undo* counts what of the last runs can come back now."""

import re
from datetime import timedelta
from html import unescape

import pytest

from demo.sample_data import create_refs, create_repository
from forgekeeper.api.batches import BATCHES
from forgekeeper.audit.deletions import Audit
from forgekeeper.ledger.holds import Batch
from forgekeeper.platform.database import now
from forgekeeper.sources.outbox import DeletedObject
from models import CLASS_COUNT, GitRefDeletion, JobArtifact, Project
from tests.harness.artifacts import destroy_chunk
from tests.harness.git_samples import put_root, replace_git
from tests.harness.performing import run_as_worker, run_child_as_worker
from tests.harness.settings import settings_with
from workers.git_ref_cleanup import clean_project_refs, git_ref_cleanup

DAY = timedelta(days=1)
RUN = 7


@pytest.fixture
def known(database):
    Batch.register(BATCHES)


def read(answer):
    """Return the page as one reads it."""
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", answer.text.partition("</h1>")[2])).split())


def destroy(*paths, ago=timedelta(0)):
    """Let artifacts expire, and a run destroy them."""
    for path in paths:
        facts = {"project_id": 1, "job_id": 1, "file_type": 1, "locked": 0, "expire_at": now() - 3 * DAY}
        JobArtifact.create(**facts, file_final_path=path)
    for number in range(CLASS_COUNT):
        audit = Audit("expired_job_artifacts", on=True, run=RUN)
        destroy_chunk(number, now() - ago, limit=100, grace=DAY, audit=audit)


def test_objects_can_be_kept_until_the_last_of_them_is_deleted(seen, known):
    for hours in (1, 5):
        DeletedObject.create(store_dir="a", file=str(hours), pick_up_at=now() + timedelta(hours=hours))

    first, last = "in (59 min|1 h) .*", "in (4 h 59|5 h 0) min"
    expected = f"2 objects in the outbox can be kept: the first is deleted {first}, the last {last}"
    assert re.search(expected, read(seen("/undo")))


def test_artifacts_come_back_as_long_as_their_objects_are_there(seen, known):
    destroy("a", "b", "c")
    DeletedObject.delete().where(DeletedObject.file == "b").execute()

    page = read(seen("/undo", object_grace="86400"))

    assert re.search(r"7 [\d.]+ s ago 0 2 of 3 in 2[34] h \d+ min forgekeeper objects hold --run 7", page)


def test_objects_that_are_due_can_be_kept_until_a_run_deletes_them(seen, known):
    destroy("a")
    DeletedObject.update(pick_up_at=now() - timedelta(hours=1)).execute()

    page = read(seen("/undo", object_grace="0"))

    assert "1 object in the outbox can be kept: the first has been due since" in page
    assert "until the next run of delete_objects forgekeeper objects hold --run 7" in page


@pytest.fixture
def deleted_refs(known, tmp_path):
    """Let a run delete two refs; return the root of their repository."""
    root = put_root(tmp_path / "repositories")
    create_repository(root, "1.git", ["refs/one", "refs/two"])
    Project.create(id=1, disk_path="1.git")
    for ref in ("refs/one", "refs/two"):
        GitRefDeletion.create(project_id=1, ref=ref)
    settings = settings_with(repositories_root=root)
    run = run_as_worker(git_ref_cleanup, settings)
    run_child_as_worker(clean_project_refs, settings, 1, run=run.id)
    return root


def test_refs_come_back_if_nobody_has_made_them_again(console, deleted_refs):
    create_refs(deleted_refs / "1.git", ["refs/one"])

    page = read(console(repositories_root=deleted_refs).get("/undo"))

    assert re.search(r"\d+ [\d.]+ s ago 2 1 of 2 forgekeeper refs restore --run \d+", page)


def test_a_git_that_is_slow_costs_the_page_no_more_than_the_time_for_counting(console, deleted_refs, monkeypatch):
    replace_git(deleted_refs.with_name("bin"), monkeypatch, 'sleep 3; exec $GIT "$@"')

    answer = console(repositories_root=deleted_refs).get("/undo")

    assert (answer.status, "2 0 of 0 looked at" in read(answer)) == (200, True)


def test_refs_are_not_counted_while_their_repositories_are_away(console, deleted_refs):
    deleted_refs.rename(deleted_refs.with_name("away"))

    assert " not known: " in read(console(repositories_root=deleted_refs).get("/undo"))


def test_batches_are_named_whose_deletions_cannot_be_undone(seen, known):
    names = "user_status_cleanup, delete_objects, stale_direct_uploads"

    assert f"Deletions by {names} cannot be undone." in read(seen("/undo"))
