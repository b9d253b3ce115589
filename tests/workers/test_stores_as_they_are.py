"""Both batches that delete objects, at stores that are slow, or answer as the one in the manual does not."""

import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import pytest

from forgekeeper.api.batches import Declaration
from forgekeeper.engine.run import Run
from forgekeeper.guards.deadline import Deadline
from forgekeeper.ledger.limits import RunTotal
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database, now
from forgekeeper.sources.outbox import DeletedObject, split_path
from forgekeeper.targets import deletion
from models import JobArtifact
from tests.harness.audited import count_open_intents, list_audit_lines
from tests.harness.settings import settings_with
from tests.harness.stale_uploads import HERE, begin, number_paths, run, time_passes, uploads
from tests.harness.thorough import whole_only
from workers.delete_objects import delete_objects
from workers.stale_direct_uploads import stale_direct_uploads

SIZE = 60
FEW = 12

pytestmark = pytest.mark.usefixtures("database")


class Kind(NamedTuple):
    """A batch that deletes objects."""

    batch: Declaration
    record: str
    field: str

    def fill(self, store, *paths):
        if self.record == "stale_upload":
            begin(store, *paths)
            return
        store.put(*paths)
        for folder, file in map(split_path, paths):
            DeletedObject.create(project_id=7, store_dir=folder, file=file, pick_up_at=now() - timedelta(hours=1))

    def run(self, store, number=1, **options):
        """Run the batch, with a limit; return how many objects it says that it has deleted."""
        name = self.batch.name
        settings = settings_with(object_stores={HERE: store.url}, **{f"max_per_day_{name}": SIZE})
        deadline = Deadline(timedelta(minutes=4), clock=lambda: time.monotonic())  # noqa: PLW0108, it may be replaced
        run = Run(self.batch, settings, deadline=deadline, number=number, **options)
        self.batch.work(run)
        run.guard.count_unreserved()
        return getattr(run.outcome, self.field)

    def left(self):
        """Count the rows or entries of objects that are not settled."""
        return DeletedObject.select().count() + client.zcard(uploads.keys.pending) + client.zcard(uploads.keys.deleting)


@pytest.fixture(params=["delete_objects", "stale_direct_uploads"])
def kind(request):
    objects = Kind(delete_objects, "deleted_object", "deleted")
    uploads = Kind(stale_direct_uploads, "stale_upload", "total_deleted_stale_entries")
    return objects if request.param == "delete_objects" else uploads


def totals():
    """What counts against limits: deleted, and reserved."""
    rows = list(RunTotal.select())
    return sum(row.records for row in rows), sum(row.reserved for row in rows)


def audited(kind):
    """How often the audit says of each path that its object was deleted."""
    return Counter(line["path"] for line in list_audit_lines(kind.record) if line["state"] == "deleted")


def test_without_bulk_deletion_everything_is_deleted(kind, s3):
    kind.fill(s3, *number_paths(FEW))
    s3.proxy.answer(501, "NotImplemented", kinds=["bulk"])

    assert (kind.run(s3), s3.keys(), kind.left()) == (FEW, set(), 0)


def test_what_a_bulk_answer_does_not_name_is_not_forgotten(kind, s3):
    kind.fill(s3, *number_paths(FEW))
    s3.proxy.name_in_bulk(5, delete=5)

    assert (kind.run(s3), s3.keys(), kind.left()) == (FEW, set(), 0)


def test_a_run_that_ends_in_the_middle_of_a_chunk_says_what_is_known_and_the_next_counts_the_rest_once(
    kind, s3, jump, monkeypatch
):
    monkeypatch.setattr(deletion, "MAX_CONCURRENT_DELETIONS", 10)
    kind.fill(s3, *number_paths(SIZE))
    s3.proxy.answer(501, "NotImplemented", kinds=["bulk"])
    s3.proxy.before("single", 31, jump)

    first = kind.run(s3)
    second = kind.run(s3, number=2)

    assert 30 <= first < SIZE
    assert (first + second, s3.keys(), kind.left(), count_open_intents()) == (SIZE, set(), 0, 0)
    assert audited(kind) == dict.fromkeys(number_paths(SIZE), 1)
    assert totals() == (SIZE, 0)


def test_a_bulk_deletion_without_an_answer_is_counted_once_by_the_next_run(kind, s3, jump):
    kind.fill(s3, *number_paths(FEW))
    s3.proxy.lose_answer("bulk", jump)

    assert (kind.run(s3), s3.keys(), kind.left()) == (0, set(), FEW)
    assert totals() == (0, FEW)

    assert (kind.run(s3, number=2), kind.left(), count_open_intents()) == (FEW, 0, 0)
    assert audited(kind) == dict.fromkeys(number_paths(FEW), 1)
    assert totals() == (FEW, 0)


def test_what_a_later_attempt_has_deleted_is_not_counted_for_the_earlier_one(kind, s3, jump):
    kind.fill(s3, *number_paths(FEW))
    s3.proxy.lose_answer("bulk", jump)
    kind.run(s3)
    DeletedObject.delete().execute()
    client.delete(uploads.keys.deleting)

    assert (kind.run(s3, number=2), count_open_intents()) == (0, 0)
    assert {line["state"] for line in list_audit_lines(kind.record)} == {"repeated"}


def test_an_emptied_folder_stays(kind, folder):
    kind.fill(folder, "@final/ab/c")

    assert (kind.run(folder), folder.keys(), (folder.root / "@final/ab").is_dir()) == (1, set(), True)


# A run that was suspended, as when a virtual machine is moved, before it asked the store to delete


def take_over(kind, store):
    """Let the claims of a run expire, another do its work, and the forge write the objects again."""
    with database.connection_context():
        DeletedObject.update(pick_up_at=now() - timedelta(hours=1)).execute()
        time_passes(timedelta(hours=1))
        kind.run(store, number=2)
        store.put(*number_paths(FEW))


@pytest.mark.parametrize("bulk", [True, False], ids=["in bulk", "singly"])
def test_it_deletes_no_object_that_another_run_has_deleted_and_the_forge_has_written_again(kind, s3, bulk):
    kind.fill(s3, *number_paths(FEW))
    if not bulk:
        s3.proxy.answer(501, "NotImplemented", kinds=["bulk"])
    # The last request before the first that deletes is for the sentinel.
    s3.proxy.before("head", 1, lambda: take_over(kind, s3))

    assert (kind.run(s3), s3.keys()) == (0, set(number_paths(FEW)))
    assert (kind.left(), count_open_intents(), audited(kind)) == (0, 0, dict.fromkeys(number_paths(FEW), 1))


def test_a_file_that_was_written_again_since_it_was_ours_stays(kind, folder, monkeypatch):
    again, *others = number_paths(FEW)
    kind.fill(folder, again, *others)
    leave_lost = deletion.ObjectDeletion._leave_lost

    def suspended(self, paths):
        ours = leave_lost(self, paths)
        (folder.root / again).unlink()
        folder.put(again)
        return ours

    monkeypatch.setattr(deletion.ObjectDeletion, "_leave_lost", suspended)

    assert (kind.run(folder), folder.keys()) == (len(others), {again})


# Unfinished uploads


def test_with_a_stale_upload_its_unfinished_parts_are_deleted(s3):
    for path in ("a/stale", "a/kept"):
        begin(s3, path)
        s3.begin_upload(path)
    JobArtifact.create(project_id=1, job_id=1, file_type=1, file_final_path="a/kept")

    assert (run(artifacts=s3.url).total_deleted_stale_entries, s3.keys()) == (1, {"a/kept"})
    assert {path for path, _ in s3.uploads()} == {"a/kept"}


def test_parts_of_an_upload_that_began_after_its_path_was_stale_are_left_alone(s3):
    long_before_moto = client.time()[0] - datetime(2000, 1, 1, tzinfo=UTC).timestamp()
    begin(s3, "a/stale", age=long_before_moto)
    s3.begin_upload("a/stale")

    assert (run(artifacts=s3.url).total_deleted_stale_entries, len(s3.uploads())) == (1, 1)


@whole_only
def test_a_store_that_refuses_to_list_uploads_keeps_no_object(s3):
    begin(s3, "a/stale")
    s3.proxy.answer(403, "AccessDenied", kinds=["uploads"])

    assert (run(artifacts=s3.url).total_deleted_stale_entries, s3.keys()) == (1, set())
