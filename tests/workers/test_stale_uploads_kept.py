"""Batch 100 against real stores: a folder and S3, with entries, stores and runs that fail."""

from contextlib import closing

import psycopg2
import pytest
from structlog.testing import capture_logs

from forgekeeper.connections import client
from forgekeeper.database import database
from forgekeeper.database import now as database_now
from forgekeeper.storage import sentinel, settled, stores
from forgekeeper.storage.objects import OUTSIDE
from forgekeeper.storage.outbox import DeletedObject
from forgekeeper.storage.settled import SettledUpload
from models import JobArtifact
from tests.harness.installation import INSTALLATION
from tests.harness.settings import settings_with
from tests.harness.stale_uploads import (
    ELSEWHERE,
    HERE,
    SECOND,
    adopt,
    attempts,
    begin,
    complete,
    members,
    register_members,
    registered,
    run,
    time_passes,
)
from workers.stale_direct_uploads import Outcome, producer
from workers.stale_direct_uploads import register as uploads

INSERT_ARTIFACT = "insert into ci_job_artifacts (project_id, job_id, file_type, file_final_path) values (1, 1, 1, %s)"

pytestmark = pytest.mark.usefixtures("database")


# Artifacts that are alive


def test_an_upload_that_a_live_artifact_names_is_kept_and_forgotten(store):
    begin(store, "kept", "stale")
    JobArtifact.create(project_id=1, job_id=1, file_type=1, file_final_path="kept")

    with capture_logs() as logs:
        outcome = run(artifacts=store.url)

    assert (outcome, store.keys(), registered()) == (Outcome(2, 1, False, 0), {"kept"}, set())
    assert [line["path"] for line in logs if line["log_level"] == "error"] == ["kept"]
    assert SettledUpload.named("artifacts", ["kept", "stale"]) == {"stale"}


def test_an_upload_that_lies_in_the_outbox_is_left_to_it(store):
    begin(store, "a/kept", "stale")
    DeletedObject.create(store_dir="a", file="kept", pick_up_at=database_now() + SECOND * 3600)

    outcome = run(artifacts=store.url)

    assert (outcome, store.keys(), registered()) == (Outcome(2, 1, False, 0), {"a/kept"}, set())


@pytest.mark.parametrize(
    ("ours", "entry"), [("", "packages:a/live"), ("/a", "packages:a/live"), ("/a/b", "packages:a/b/live")]
)
def test_an_artifact_keeps_its_object_under_every_location_that_leads_to_it(folder, ours, entry):
    place = folder.root / ours.strip("/")
    place.mkdir(parents=True, exist_ok=True)
    sentinel.Store(HERE, f"{folder.url}{ours}").create_sentinel(INSTALLATION)
    name = entry.partition(":")[2].removeprefix(ours.lstrip("/")).lstrip("/")
    folder.put(f"{ours}/{name}".lstrip("/"))
    JobArtifact.create(project_id=1, job_id=1, file_type=1, file_final_path=name)
    register_members(entry)

    run(artifacts=f"{folder.url}{ours}", packages=folder.url)

    assert (place / name).exists()
    assert registered() == set()


# Redis goes back


@pytest.fixture
def back():
    """Call it to note what is pending; call what that returns to let it be so again."""

    def note():
        then = client.dump(uploads.PENDING)
        return lambda: client.restore(uploads.PENDING, 0, then, replace=True)

    return note


def test_an_upload_that_was_reaped_never_completes_though_redis_goes_back(store, back):
    begin(store, "a/b")
    go_back = back()
    run(artifacts=store.url)

    go_back()

    assert (producer.exists(client, HERE, "a/b"), complete(HERE, "a/b"), uploads.count(client)) == (False, False, 1)


@pytest.mark.parametrize("location", [HERE, ELSEWHERE])
def test_what_has_completed_stays_though_redis_goes_back(folder, elsewhere, back, location):
    begin(folder if location == HERE else elsewhere, "kept", location=location)
    go_back = back()
    with database.atomic():
        assert producer.complete(client, location, "kept")
        if location == HERE:
            JobArtifact.create(project_id=1, job_id=1, file_type=1, file_final_path="kept")
    go_back()

    outcome = run(artifacts=folder.url, lfs=elsewhere.url)

    assert (outcome, folder.keys() | elsewhere.keys(), registered()) == (Outcome(1, 0, False, 0), {"kept"}, set())


def test_what_a_producer_is_just_completing_waits_for_a_later_run(folder, urls):
    begin(folder, "late", "stale")
    with closing(psycopg2.connect(urls.database)) as connection, connection.cursor() as cursor:
        cursor.execute("select pg_advisory_xact_lock(hashtextextended(%s, %s))", (f"{HERE}:late", settled.LOCKS))
        outcome = run(artifacts=folder.url)
        # To close a connection is not to wait until the server has let go of its locks.
        connection.rollback()

    time_passes(settings_with().upload_visibility + SECOND)
    later = run(artifacts=folder.url)
    assert (outcome, attempts(), later) == (Outcome(2, 1, False, 0), {}, Outcome(1, 1, False, 0))


def test_a_row_that_is_committed_just_before_the_look_is_seen_whatever_the_isolation(urls):
    database.execute_sql("set session characteristics as transaction isolation level repeatable read")

    with database.atomic():
        free = SettledUpload.lock_free(HERE, ["live"])
        with closing(psycopg2.connect(urls.database)) as other, other, other.cursor() as cursor:
            cursor.execute(INSERT_ARTIFACT, ("live",))
        kept = stores.answered_for(JobArtifact, HERE, free, settings_with())

    database.execute_sql("set session characteristics as transaction isolation level read committed")
    assert kept == {"live": "an artifact names it"}


# Where objects may be deleted


def test_outside_the_folders_nothing_is_deleted_and_the_entry_is_put_aside(store):
    begin(store, "up/a", "up2/a", "backup/db")

    with capture_logs() as logs:
        outcome = run(prefixes={HERE: ("up",)}, artifacts=store.url)

    assert (outcome, store.keys()) == (Outcome(3, 1, False, 2), {"up2/a", "backup/db"})
    assert members(uploads.FAILED) == {"artifacts:up2/a", "artifacts:backup/db"}
    assert [(line["entries"], line["reason"]) for line in logs] == [(2, OUTSIDE)]


# Objects that were adopted


def test_of_the_adopted_those_that_were_written_since_are_kept(store):
    # A bucket knows no other time of writing than that of the server: all of its objects were written just now.
    store.put("changed")
    adopt("changed", "never/there")

    with capture_logs() as logs:
        outcome = run(artifacts=store.url)

    assert (outcome.failed_entries, store.keys(), registered()) == (0, {"changed"}, set())
    assert outcome.total_deleted_stale_entries == 1
    assert [line["path"] for line in logs if line["log_level"] == "error"] == ["changed"]
