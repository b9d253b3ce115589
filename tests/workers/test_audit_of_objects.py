"""What the audit knows of objects and refs: said before they go, closed with their rows, after a crash by the next run."""

from datetime import datetime, timedelta
from functools import partial

import pytest

from forgekeeper.audit.deletions import Deletion
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database, now
from forgekeeper.sources.outbox import DeletedObject, split_path
from forgekeeper.targets.git_repository import RepositoryFailed
from tests.harness.audited import count_open_intents, interrupted_at, list_audit_lines, list_audited_deletions
from tests.harness.git_samples import replace_git
from tests.harness.performing import perform
from tests.harness.ref_deletions import row
from tests.harness.settings import settings_with
from tests.harness.stale_uploads import uploads as register
from tests.harness.tables import before_each
from tests.harness.thorough import whole_only
from workers.delete_objects import delete_objects
from workers.stale_direct_uploads import stale_direct_uploads

OBJECT, UPLOAD = "deleted_object", "stale_upload"
HERE = "artifacts"
FOUR_HOURS = 4 * 3_600
HOUR = timedelta(hours=1)

pytestmark = pytest.mark.usefixtures("database")


def on(store, declared, **options):
    return perform(declared, settings=settings_with(object_stores={HERE: store.url}, **options), number=17)


@pytest.fixture
def run(store):
    """Run a batch on each kind of store in turn."""
    return partial(on, store)


def record(store, *paths, project=7):
    """Leave objects behind whose artifacts are gone; return the ids of their rows."""
    store.put(*paths)
    due = now() - HOUR
    parts = [split_path(path) for path in paths]
    return [
        DeletedObject.create(project_id=project, store_dir=folder, file=file, pick_up_at=due, created_at=due).id
        for folder, file in parts
    ]


def upload(store, *paths):
    """Register uploads that began long ago, with their objects."""
    store.put(*paths)
    began = client.time()[0] - FOUR_HOURS
    client.zadd(register.keys.pending, {f"{HERE}:{path}": began for path in paths})
    return began


def claims_run_out():
    DeletedObject.update(pick_up_at=DeletedObject.pick_up_at - HOUR).execute()
    for member in client.zrange(register.keys.deleting, 0, -1):
        client.zadd(register.keys.deleting, {member: 0})


# The outbox


def test_each_deleted_object_has_its_line(run, store):
    numbers = record(store, "a/b/c", "d")

    run(delete_objects)

    found = sorted(list_audit_lines(OBJECT), key=lambda line: line["id"])
    assert [(line["id"], line["path"], line["project_id"], line["state"]) for line in found] == [
        (numbers[0], "a/b/c", 7, "deleted"),
        (numbers[1], "d", 7, "deleted"),
    ]
    assert datetime.fromisoformat(found[0]["due"]) < now() - HOUR


def test_it_is_said_before_the_object_goes(run, store):
    record(store, "a")
    with interrupted_at("delete_objects.deleted"):
        run(delete_objects)

    assert [line["path"] for line in list_audit_lines(OBJECT, "intent")] == ["a"]
    assert list_audit_lines(OBJECT) == []


def test_an_object_held_back_between_claim_and_deletion_is_left_alone(folder):
    record(folder, "a")
    # As if somebody held it back right after the claim.
    with before_each("update", "deleted_objects", "new.pick_up_at := 'infinity'"):
        outcome = on(folder, delete_objects)

    assert (outcome.deleted, folder.keys()) == (0, {"a"})
    assert Deletion.select().count() == 0


# Uploads


def test_each_stale_upload_has_its_line(run, store):
    began = upload(store, "a/b", "c")

    run(stale_direct_uploads)

    assert list_audited_deletions(UPLOAD, "path") == {"a/b", "c"}
    assert {(line["location"], line["state"]) for line in list_audit_lines(UPLOAD)} == {(HERE, "deleted")}
    due = {datetime.fromisoformat(line["due"]).timestamp() for line in list_audit_lines(UPLOAD)}
    assert due == {began + timedelta(hours=3).total_seconds()}


def test_it_is_said_in_the_transaction_that_remembers_an_upload_as_reaped(run, store):
    upload(store, "a")
    database.execute_sql("alter table settled_uploads add constraint refused check (path <> 'a')")
    try:
        with pytest.raises(Exception, match="refused"):
            run(stale_direct_uploads)
    finally:
        database.execute_sql("alter table settled_uploads drop constraint refused")

    assert Deletion.select().count() == 0
    assert store.keys() == {"a"}


# Both


@whole_only
@pytest.mark.parametrize("step", ["marked", "deleted", "settled"])
@pytest.mark.parametrize("kind", [OBJECT, UPLOAD])
def test_what_a_crash_left_open_the_next_run_closes(run, store, kind, step):
    batch, put = {OBJECT: (delete_objects, record), UPLOAD: (stale_direct_uploads, upload)}[kind]
    put(store, "a", "b")
    with interrupted_at(f"{batch.name}.{step}"):
        run(batch)

    claims_run_out()
    run(batch)

    said = [line["path"] for line in list_audit_lines(kind) if line["state"] == "deleted"]
    assert (sorted(said), count_open_intents()) == (["a", "b"], 0)


# Refs

REF = "git_ref_deletion"


def deleted():
    """The refs of which it is said that they were deleted."""
    return [line["ref"] for line in list_audit_lines(REF) if line["state"] == "deleted"]


def test_each_deleted_ref_has_its_line(clean, repository):
    repository.loose("refs/mr/2", value=repository.two)
    since = now() - timedelta(hours=1)
    numbers = [row("refs/mr/1", created_at=since), row("refs/mr/2", created_at=since)]

    clean()

    facts = {"project_id": 7, "due": since.isoformat(), "state": "deleted"}
    assert list_audit_lines(REF) == [
        facts | {"id": numbers[0], "ref": "refs/mr/1", "oid": repository.one},
        facts | {"id": numbers[1], "ref": "refs/mr/2", "oid": repository.two},
    ]


@pytest.mark.parametrize("step", ["deleted", "settled"])
def test_what_a_crash_left_open_the_next_child_closes(clean, repository, step):
    row("refs/mr/1")
    with interrupted_at(f"clean_project_refs.{step}"):
        clean()

    clean()

    assert deleted() == ["refs/mr/1"]
    assert count_open_intents() == 0


def test_of_refs_that_a_crash_left_it_is_said_that_they_were_kept_and_one_pushed_to_since_stays(
    clean, repository, tmp_path, monkeypatch
):
    row("refs/mr/1")
    row("refs/mr/2")
    with monkeypatch.context() as patched:
        replace_git(tmp_path / "bin", patched, 'case "$*" in *update-ref*) kill -9 $$;; esac; exec $GIT "$@"')
        with pytest.raises(RepositoryFailed):
            clean()
    (repository.path / "refs/mr").mkdir()
    (repository.path / "refs/mr/2").write_text(repository.two)

    clean()

    states = [(line["ref"], line["oid"], line["state"]) for line in list_audit_lines(REF)]
    assert states == [
        ("refs/mr/1", repository.one, "kept"),
        ("refs/mr/2", repository.one, "moved"),
        ("refs/mr/1", repository.one, "deleted"),
    ]
    assert (count_open_intents(), repository.refs()["refs/mr/2"]) == (0, repository.two)


def test_a_ref_pushed_to_after_it_was_told_stays_and_its_line_says_so(clean, repository, tmp_path, monkeypatch):
    row("refs/mr/1")
    push = f"mkdir -p {repository.path}/refs/mr; [ -e $0.done ] || echo {repository.two} > {repository.path}/refs/mr/1"
    replace_git(
        tmp_path / "bin", monkeypatch, f'case "$*" in *update-ref*) {push}; touch $0.done;; esac; exec $GIT "$@"'
    )

    clean()

    assert [(line["oid"], line["state"]) for line in list_audit_lines(REF)] == [(repository.one, "locked")]
    assert repository.refs()["refs/mr/1"] == repository.two


def test_a_row_that_cannot_be_closed_keeps_its_ref_s_line(clean, repository):
    bad = row("refs/mr/1")
    row("refs/mr/2")
    no = f"if old.id = {bad} then raise 'no'; end if"
    with before_each("update", "batched_git_ref_updates_deletions", no):
        clean()

    assert sorted(deleted()) == ["refs/mr/1", "refs/mr/2"]
    assert count_open_intents() == 0
