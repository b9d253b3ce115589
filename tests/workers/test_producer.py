"""The producer's way in: a path that anybody names is refused, and what was reaped never completes."""

from contextlib import closing, suppress

import psycopg2
import pytest

from forgekeeper.platform.connections import client
from forgekeeper.sources.outbox import DeletedObject
from forgekeeper.sources.register.entries import BeingDeleted, MalformedUpload
from forgekeeper.sources.settled import NoTransaction, SettledUpload
from models import JobArtifact
from workers.stale_direct_uploads import producer as uploads

PATH = "ab/sample:1.zip"


@pytest.fixture(autouse=True)
def servers(database):
    """Work on real servers."""


@pytest.fixture
def transaction(database):
    """The transaction in which a producer inserts its row."""
    with database.atomic() as transaction:
        yield transaction


def test_a_path_that_a_live_artifact_names_is_refused():
    JobArtifact.create(project_id=1, job_id=1, file_type=1, file_final_path=PATH)

    with pytest.raises(uploads.PathTaken):
        uploads.prepare(client, "artifacts", PATH)


@pytest.mark.parametrize(
    "take",
    [
        lambda: DeletedObject.create(store_dir="ab", file="sample:1.zip"),
        lambda: SettledUpload.create(location="artifacts", path=PATH, reaped=True),
        lambda: SettledUpload.create(location="artifacts", path=PATH, reaped=False),
    ],
    ids=["the outbox", "reaped", "completed"],
)
def test_a_path_that_was_used_before_is_refused(take):
    take()

    with pytest.raises(uploads.PathTaken):
        uploads.prepare(client, "artifacts", PATH)


def test_a_path_that_is_being_deleted_is_refused():
    client.zadd("{pending_direct_uploads}:deleting", {f"artifacts:{PATH}": 0})

    with pytest.raises(BeingDeleted):
        uploads.prepare(client, "artifacts", PATH)


@pytest.mark.parametrize(
    ("location", "path"),
    [
        *(("", "a"), ("arti:facts", "a")),
        *(("artifacts", path) for path in ("", "/a", "a/", "a//b", "a/../b", "./a", "a\nb", "a\0b", "a\udcff")),
    ],
)
@pytest.mark.parametrize("act", [uploads.prepare, uploads.complete])
def test_a_path_that_no_object_can_bear_is_refused(transaction, act, location, path):
    with pytest.raises(MalformedUpload):
        act(client, location, path)


# Completing


def test_an_upload_completes_once(transaction):
    uploads.prepare(client, "artifacts", PATH)

    assert [uploads.complete(client, "artifacts", PATH) for _ in range(2)] == [True, False]


def test_what_has_completed_where_no_table_names_it_is_remembered_with_the_row(database):
    for path, kept in (("kept", True), ("rolled back", False)):
        uploads.prepare(client, "lfs", path)
        with database.atomic() as transaction:
            assert uploads.complete(client, "lfs", path)
            if not kept:
                transaction.rollback()

    assert SettledUpload.find_settled("lfs", ["kept", "rolled back"], reaped=False) == {"kept"}


def test_while_a_producer_completes_no_sweep_settles_its_upload(transaction, urls):
    uploads.prepare(client, "artifacts", PATH)
    uploads.complete(client, "artifacts", PATH)

    assert free_elsewhere(urls, [PATH, "other"]) == {"other"}


def free_elsewhere(urls, paths):
    """Ask in another session which locks are free, by the statement that docs/uploads.md gives to producers."""
    free = set()
    with closing(psycopg2.connect(urls.database)) as connection, connection.cursor() as cursor:
        cursor.execute("set lock_timeout = '10ms'")
        connection.commit()
        for path in paths:
            with suppress(psycopg2.errors.LockNotAvailable), connection:
                entry = f"artifacts:{path}"
                cursor.execute("select pg_advisory_xact_lock(hashtextextended(%s, 1801807216))", (entry,))
                free.add(path)
    return free


def test_to_complete_outside_a_transaction_is_an_error():
    with pytest.raises(NoTransaction):
        uploads.complete(client, "artifacts", PATH)


def test_to_complete_where_rows_of_others_would_not_be_seen_is_an_error(transaction, database):
    database.execute_sql("set transaction isolation level repeatable read")

    with pytest.raises(NoTransaction):
        uploads.complete(client, "artifacts", PATH)


def test_programs_that_import_the_module_of_the_last_release_still_work():
    import workers.stale_direct_uploads.producer as by_its_old_name
    from workers.stale_direct_uploads.producer import PathTaken, complete

    assert (by_its_old_name, PathTaken, complete) == (uploads, uploads.PathTaken, uploads.complete)
