"""Ways in which more went than a limit allows, each tried again: a day's limit holds whatever fails."""

import threading
from contextlib import suppress
from datetime import timedelta

import peewee as pw
import pytest

from demo.sample_data import add_statuses as statuses
from demo.sample_data import create_repository, list_refs
from forgekeeper.api.batches import BATCHES, CHILDREN
from forgekeeper.guards import breaker, run_guard
from forgekeeper.ledger.holds import Batch, Hold
from forgekeeper.ledger.limits import LOCK_BATCH_ROW, RunTotal
from forgekeeper.ledger.quarantine import Quarantined
from forgekeeper.platform.database import database as db
from forgekeeper.platform.database import release_connection
from forgekeeper.sources.outbox import DeletedObject
from forgekeeper.sources.queue import QueueTable
from forgekeeper.targets import stores
from models import GitRefDeletion, Project, UserStatus
from tests.harness.bulk_imports import entity
from tests.harness.git_samples import put_root
from tests.harness.performing import run_as_worker, run_child_as_worker
from tests.harness.settings import settings_with
from tests.harness.stale_uploads import HERE, begin
from tests.harness.tables import before_each
from tests.harness.thorough import whole_only

OBJECTS, STATUSES = BATCHES["delete_objects"], BATCHES["user_status_cleanup"]
UPLOADS = BATCHES["stale_direct_uploads"]
REFS = CHILDREN["clean_project_refs"]

pytestmark = pytest.mark.usefixtures("database")


def attempt(work, times=3):
    """Try it so often, whatever fails; what lies in quarantine or is claimed may be tried again each time."""
    for _ in range(times):
        worker = threading.Thread(target=tried, args=[work])
        worker.start()
        worker.join()
        Quarantined.delete().execute()
        DeletedObject.update(pick_up_at=DeletedObject.pick_up_at - timedelta(hours=1)).execute()


def tried(work):
    """Work on a connection of its own, as a worker's thread does; it may fail."""
    db.connect()
    try:
        with suppress(Exception):
            work()
    finally:
        release_connection()


def used(batch):
    return sum(row.records + row.reserved for row in RunTotal.select().where(RunTotal.batch == batch.name))


@pytest.fixture
def released():
    """Let go so many records of a held batch."""

    def release_some(batch, count):
        Hold.add(batch.name, "breaker", by="a run", reason="too much")
        breaker.release_batch(batch.name, reason="I looked", by="ann", expect=count)

    return release_some


def test_of_a_release_that_is_smaller_than_a_chunk_just_as_many_uploads_go(folder, released):
    begin(folder, "a/1", "a/2", "a/3")
    released(UPLOADS, 2)

    row = run_as_worker(UPLOADS, settings_with(object_stores={HERE: folder.url}))

    assert (row.state, row.result["total_deleted_stale_entries"]) == ("succeeded", 2)


@pytest.fixture
def objects(folder):
    """Nine hundred objects whose artifacts are gone, of which three hundred may go a day."""
    paths = [f"sample/{number}" for number in range(900)]
    folder.put(*paths)
    rows = [{"project_id": 1, "store_dir": "sample", "file": path.partition("/")[2]} for path in paths]
    DeletedObject.insert_many(rows).execute()
    stores.open_object_store.cache_clear()
    yield settings_with(object_stores={DeletedObject.location: folder.url}, max_per_day_delete_objects=300)
    stores.open_object_store.cache_clear()


@whole_only
def test_of_objects_no_more_go_though_the_connection_is_lost_before_their_rows_are_forgotten(
    folder, objects, monkeypatch
):
    def lost(_queue, _paths):
        db.execute_sql("select pg_terminate_backend(pg_backend_pid())")

    monkeypatch.setattr(QueueTable, "remove", lost)
    attempt(lambda: run_as_worker(OBJECTS, objects))

    assert (len(folder.keys()), used(OBJECTS)) == (600, 300)


@pytest.fixture
def refs(tmp_path):
    """A project with fifteen refs, of which five may go a day."""
    root = put_root(tmp_path / "repositories")
    names = [f"refs/merge-requests/{number}/head" for number in range(15)]
    create_repository(root, "7.git", names)
    Project.create(id=7, disk_path="7.git")
    GitRefDeletion.insert_many([{"project_id": 7, "ref": name} for name in names]).execute()
    settings = settings_with(repositories_root=root, max_per_day_git_ref_cleanup=5)
    return settings, lambda: len(list_refs(root / "7.git") & set(names))


def test_of_refs_no_more_go_though_a_trigger_keeps_their_rows(refs):
    settings, left = refs

    with before_each("update", "batched_git_ref_updates_deletions", "raise exception 'refused'"):
        attempt(lambda: run_child_as_worker(REFS, settings, 7))

    assert (left(), used(BATCHES["git_ref_cleanup"])) == (10, 5)


def test_of_rows_no_more_go_though_the_reply_to_a_deletion_is_lost(monkeypatch):
    statuses(2_500)
    settings, real, lost = settings_with(max_per_day_user_status_cleanup=300), db.obj.execute_sql, []

    def lose(sql, params=None):
        answer = real(sql, params)
        if 'delete from "user_statuses"' in sql and len(lost) < 2:
            lost.append(sql)
            raise pw.OperationalError("the reply was lost")
        return answer

    monkeypatch.setattr(db.obj, "execute_sql", lose)
    attempt(lambda: run_as_worker(STATUSES, settings), times=4)

    assert (UserStatus.select().count(), used(STATUSES), len(lost)) == (2_200, 300, 2)


def test_far_from_its_limits_a_run_reserves_several_chunks_at_once_and_keeps_nothing(monkeypatch):
    statuses(7_500)
    Batch.register([STATUSES.name])
    settings, real, locked = settings_with(max_per_run_user_status_cleanup=10**9), db.obj.execute_sql, []

    def count_locks(sql, params=None):
        locked.extend([sql] if sql == LOCK_BATCH_ROW else [])
        return real(sql, params)

    monkeypatch.setattr(db.obj, "execute_sql", count_locks)
    monkeypatch.setattr(run_guard, "GUARD_INTERVAL_SECONDS", 600.0)  # or a slow machine begins with a chunk again
    row = run_as_worker(STATUSES, settings)

    (total,) = RunTotal.select()
    assert (row.result["deleted"], total.records, total.reserved) == (3_000, 3_000, 0)
    # 1, 2, 4, 8 and 16 chunks for 30.
    assert len(locked) == 5


# What was reserved and certainly did not go


@pytest.fixture(params=["rows", "changes", "objects", "refs", "uploads"])
def limited_to_five(request, folder, tmp_path):
    """Let each kind of batch have ten due records, of which five may go a day; return what works on them, and the batch."""
    if request.param == "rows":
        statuses(30)
        batch, options = STATUSES, {}
    elif request.param == "changes":
        for _ in range(10):
            entity()
        batch, options = BATCHES["stale_imports"], {}
    elif request.param == "objects":
        folder.put(*(paths := [f"sample/{number}" for number in range(10)]))
        DeletedObject.insert_many([{"store_dir": "sample", "file": path.partition("/")[2]} for path in paths]).execute()
        batch, options = OBJECTS, {"object_stores": {DeletedObject.location: folder.url}}
    elif request.param == "uploads":
        begin(folder, *(f"a/{number}" for number in range(10)))
        batch, options = UPLOADS, {"object_stores": {HERE: folder.url}}
    else:
        settings, _left = request.getfixturevalue("refs")
        return lambda: run_child_as_worker(REFS, settings, 7), BATCHES["git_ref_cleanup"]
    settings = settings_with(**options, **{f"max_per_day_{batch.name}": 5})
    return lambda: run_as_worker(batch, settings), batch


def test_what_a_full_disk_keeps_uses_up_nothing_of_a_limit(limited_to_five):
    work, batch = limited_to_five

    with before_each("insert", "audit_deletions", "raise exception 'no space left' using errcode = 'disk_full'"):
        attempt(work, times=1)

    assert used(batch) == 0
    attempt(work, times=1)
    assert used(batch) == 5
