"""What the exporter says of what is due, and of what waits for a person."""

from datetime import timedelta

import pytest

from forgekeeper.connections import client
from forgekeeper.database import backlog, now
from forgekeeper.runs import quarantine
from forgekeeper.storage.outbox import MAX_ATTEMPTS, DeletedObject
from models import BulkImport, BulkImportEntity, GitRefDeletion, JobArtifact, UserStatus
from workers.stale_direct_uploads import register


def near(instant, tolerance=20.0):
    return pytest.approx(instant.timestamp(), abs=tolerance)


def ago(**duration):
    return now() - timedelta(**duration)


def a_status(**duration):
    UserStatus.create(user_id=UserStatus.select().count() + 1, clear_status_at=ago(**duration))


def an_artifact(**duration):
    JobArtifact.create(
        project_id=1,
        job_id=JobArtifact.select().count(),
        file_type=1,
        file_final_path="x",
        locked=0,
        expire_at=ago(**duration),
    )


BACKLOGS = {
    ("user_status_cleanup", "user_status"): a_status,
    ("delete_artifact_bucket", "expired_artifact"): an_artifact,
    ("clean_project_refs", "git_ref_deletion"): lambda **duration: GitRefDeletion.create(
        project_id=1, ref="refs/x", updated_at=ago(**duration)
    ),
    ("delete_objects", "deleted_object"): lambda **duration: DeletedObject.create(
        store_dir="a", file="b", pick_up_at=ago(**duration)
    ),
    ("stale_imports", "bulk_import"): lambda **duration: BulkImport.create(
        user_id=1, updated_at=ago(days=1, **duration)
    ),
    ("stale_imports", "entity"): lambda **duration: BulkImportEntity.create(
        bulk_import_id=1,
        source_full_path="a",
        destination_name="b",
        destination_namespace="c",
        updated_at=ago(days=1, **duration),
    ),
    ("stale_direct_uploads", "stale_upload"): lambda **duration: client.zadd(
        register.PENDING, {f"s:{duration}": int(ago(hours=3, **duration).timestamp())}
    ),
}


@pytest.mark.parametrize("kind", BACKLOGS, ids=lambda kind: kind[1])
def test_a_backlog_is_counted_and_as_old_as_its_oldest_record(look, kind):
    add = BACKLOGS[kind]
    add(minutes=10)
    add(minutes=30)
    if kind[1] != "git_ref_deletion":
        add(minutes=-10)  # not due yet

    page = look()

    labels = dict(zip(("batch", "record"), kind, strict=True))
    assert page.value("backlog_records", **labels) == 2
    assert page.value("backlog_oldest_timestamp_seconds", **labels) == near(ago(minutes=30))


def test_a_count_goes_up_to_its_bound_and_no_further(look, monkeypatch):
    monkeypatch.setattr(backlog, "BOUND", 3)
    for _ in range(5):
        a_status(minutes=1)

    assert look().value("backlog_records", batch="user_status_cleanup", record="user_status") == 3


def test_what_failed_more_than_once_or_was_refused_is_in_quarantine(look):
    client.zadd(register.FAILED, {"s:x": 1})
    DeletedObject.create(store_dir="a", file="b", attempts=MAX_ATTEMPTS)
    GitRefDeletion.create(project_id=1, ref="refs/x", status=3)
    for key in (1, 1, 2):
        quarantine.fail("user_status_cleanup", "user_status", str(key), "x", reason="record_failed")
    quarantine.fail("git_ref_cleanup", "clean_project_refs", "7", "x", reason="worker_lost")
    quarantine.fail("unknown", "cron", "8", "x", reason="unreadable")

    counted = look().series("quarantine_records")

    assert {labels: count for labels, count in counted.items() if count} == {
        ("stale_direct_uploads", "failed_upload"): 1,
        ("delete_objects", "dead_object"): 1,
        ("clean_project_refs", "rejected_ref"): 1,
        ("user_status_cleanup", "user_status"): 1,
        ("git_ref_cleanup", "clean_project_refs"): 1,
        ("unknown", "message"): 1,
    }


def test_expired_artifacts_that_wait_for_the_forge_are_counted(look):
    due = {"project_id": 1, "job_id": 1, "file_type": 1, "expire_at": ago(hours=1)}
    JobArtifact.create(file_final_path="", file="x.zip", locked=0, **due)
    for _ in range(2):
        JobArtifact.create(file_final_path="x", locked=2, **due)
    JobArtifact.create(file_final_path="x", locked=2, **due | {"expire_at": ago(hours=-1)})
    JobArtifact.create(file_final_path="", file="x.zip", locked=1, **due)
    JobArtifact.create(file_final_path="", locked=0, **due)
    JobArtifact.create(file_final_path="", file="x.zip", locked=2, **due | {"file_type": 3})

    assert look().series("waiting_artifacts") == {("no_path",): 1, ("unknown",): 2}
