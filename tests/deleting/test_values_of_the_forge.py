"""Values that a forge may have in its rows: times that Python cannot hold, and artifacts without a path."""

import pytest

from forgekeeper.database import database, now
from forgekeeper.runs.previewing import preview
from forgekeeper.runs.quarantine import Quarantined
from forgekeeper.storage.outbox import DeletedObject
from models import BulkImport
from tests.harness.many_rows import artifacts, destroy_artifacts, statuses
from tests.harness.settings import settings_with
from workers import delete_objects, expired_job_artifacts
from workers.stale_imports import stale_imports
from workers.user_status_cleanup import user_status_cleanup

OUT_OF_PYTHONS_REACH = ["0044-03-15 12:00:00+00 BC", "-infinity"]
every_instant = pytest.mark.parametrize("instant", OUT_OF_PYTHONS_REACH)

pytestmark = pytest.mark.usefixtures("database")


# Values that Python cannot hold


@every_instant
def test_the_backlog_is_known_however_old_its_oldest_is(instant):
    artifacts(3)
    statuses(3)
    BulkImport.create(user_id=1)
    database.execute_sql("update ci_job_artifacts set expire_at = %s", (instant,))
    database.execute_sql("update user_statuses set clear_status_at = %s", (instant,))
    database.execute_sql("update bulk_imports set updated_at = %s", (instant,))
    database.execute_sql(
        "insert into ci_deleted_objects (store_dir, file, pick_up_at) values ('', 'x', %s)", (instant,)
    )

    found = [batch.due(now()) for batch in (expired_job_artifacts.expired_job_artifacts, user_status_cleanup)]
    found += [batch.due(now()) for batch in (stale_imports, delete_objects.delete_objects)]

    assert [one.records for one in found] == [3, 3, 1, 1]
    assert [one.oldest.timestamp() < 0 for one in found] == [True] * 4


# Artifacts without a final path


@pytest.fixture
def paths_may_be_missing(database):
    database.execute_sql("alter table ci_job_artifacts alter file_final_path drop not null")
    yield
    database.execute_sql("delete from ci_job_artifacts")
    database.execute_sql("alter table ci_job_artifacts alter file_final_path set not null")


def put_aside(path, file, which):
    """Take the paths of some artifacts away."""
    statement = f"update ci_job_artifacts set file_final_path = %s, file = %s where {which}"
    database.execute_sql(statement, (path, file))


@pytest.mark.usefixtures("paths_may_be_missing")
def test_run_preview_backlog_and_breaker_agree_on_artifacts_without_a_path():
    artifacts(20)
    put_aside("", "x.zip", "id <= 3")
    put_aside(None, "x.zip", "id between 4 and 5")
    put_aside("", None, "id = 6")
    database.execute_sql("update ci_job_artifacts set locked = 2 where id > 18")
    batch, child = expired_job_artifacts.expired_job_artifacts, expired_job_artifacts.delete_artifact_bucket

    (shown,) = preview(batch, settings_with()).parts[-1:]

    assert (shown.records, shown.kept) == (13, {"no_path": 5, "unknown": 2})
    assert child.backlogs["expired_artifact"](now()).records == 13
    assert expired_job_artifacts.at_stake(now()).due(100) == 13
    assert (destroy_artifacts(), DeletedObject.select().count()) == (13, 12)
    assert Quarantined.select().count() == 0
