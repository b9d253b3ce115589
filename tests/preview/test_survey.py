"""How previews count: bounded in time, beside locks, kept from writing."""

import time
from datetime import timedelta

import peewee as pw
import pytest

from demo import sample_data as sample
from forgekeeper.api.batches import BATCHES
from forgekeeper.api.records import Record
from forgekeeper.engine.previewing import preview_batch
from forgekeeper.ledger import quarantine
from forgekeeper.platform.database import database as db
from forgekeeper.platform.database import now
from forgekeeper.platform.database.survey import SurveyedRows, survey_rows
from models import GitRefDeletion, JobArtifact, Project, UserStatus
from tests.harness.git_samples import put_root
from tests.harness.settings import settings_with
from tests.harness.toys import declare_toy_batch

SLOW = "clear_status_at <= clock_timestamp() and pg_sleep(0.05) is not null"
FAST = "clear_status_at <= clock_timestamp()"

pytestmark = pytest.mark.usefixtures("database")


def statuses(where=FAST, **options):
    return SurveyedRows("user_statuses", where, {}, key="user_id", due="clear_status_at", **options)


def look(rows, *, size=10, seconds=60.0):
    return survey_rows(rows, size=size, until=time.monotonic() + seconds)


def previewed(name, settings=None, **options):
    return preview_batch(BATCHES[name], settings or settings_with(), **options)


def the_part(found, record=None):
    (part,) = [part for part in found.parts if record in (None, part.record)]
    return part


# Time


def test_a_preview_that_was_cut_off_says_that_it_is_an_estimate():
    sample.add_statuses(5_000)
    db.execute_sql("analyze user_statuses")
    slow = declare_toy_batch(records=[Record("user_status")])
    slow.add_preview(lambda look: [look.count_rows(look.begin_part("user_status"), statuses(SLOW))])

    part = the_part(preview_batch(slow, settings_with(), within=timedelta(0)))

    assert part.estimate
    assert part.records == pytest.approx(2_000, rel=0.2)


# Locks


def test_artifacts_whose_statistics_another_session_has_locked_stay(other):
    sample.add_artifacts(70)
    other.execute("select from project_statistics where project_id = 3 for update")

    part = the_part(previewed("expired_job_artifacts"))

    assert "3" not in part.projects
    assert (
        part.kept["busy"]
        == JobArtifact.select().where(JobArtifact.is_expired(now()), JobArtifact.project_id == 3).count()
    )


# Bad records


def test_a_bad_record_that_is_passed_over_stays():
    sample.add_statuses(5)
    bad = UserStatus.select().where(UserStatus.clear_status_at <= now()).first().user_id
    for _ in range(2):
        quarantine.record_failure("user_status_cleanup", "user_status", str(bad), "it is bad", reason="record_failed")

    part = the_part(previewed("user_status_cleanup"))

    assert (part.records, part.kept) == (1, {"passed_over": 1})


# Nothing is written


def test_a_preview_that_would_write_is_refused():
    writing = declare_toy_batch()
    writing.add_preview(lambda _look: [UserStatus.create(user_id=1)])

    with pytest.raises(pw.PeeweeException, match="read-only transaction"):
        preview_batch(writing, settings_with())


# Declarations


def test_a_batch_that_declares_no_preview_says_so():
    (note,) = preview_batch(declare_toy_batch(), settings_with()).notes

    assert note == "toys declares no preview, so the effect of a run is unknown"


# Refs


def test_the_rows_of_a_repository_that_is_gone_would_be_closed(tmp_path):
    root = put_root(tmp_path / "repositories")
    Project.create(id=1, disk_path="1.git")
    GitRefDeletion.create(project_id=1, ref="refs/mr/1")

    found = previewed("git_ref_cleanup", settings_with(repositories_root=root))

    assert (the_part(found, "gone_ref_deletion").records, the_part(found, "git_ref_deletion").records) == (1, 0)
