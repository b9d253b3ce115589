"""Mistakes of people: what each deletes until the brake holds."""

from datetime import timedelta

import peewee as pw
import pytest

from forgekeeper.batches import BATCHES, FeatureFlag
from forgekeeper.database import database as db
from forgekeeper.database import now
from forgekeeper.runs.holds import Hold
from forgekeeper.runs.ledger import JobRun
from forgekeeper.storage.installation import agree
from models import UserStatus
from tests.harness.lived import lived
from tests.harness.performing import recorded
from tests.harness.settings import settings_with
from workers.expired_job_artifacts import FLAG

STATUSES, ARTIFACTS = BATCHES["user_status_cleanup"], BATCHES["expired_job_artifacts"]
MANY, FEW = 10_000, 2_000
DAY = timedelta(days=1)

STATUS_ROWS = """
    insert into user_statuses (user_id, clear_status_at)
    select n, clock_timestamp() + interval '1 hour' + n * interval '1 ms' from generate_series(1, %(total)s) as n
"""
ARTIFACT_ROWS = """
    insert into ci_job_artifacts (project_id, job_id, file_type, file, file_final_path, size, created_at, expire_at, locked)
    select 1 + n %% 7, n, 1, 'a.zip', 'a/' || n, 100, made, made + interval '90 days', 0
    from generate_series(1, %(total)s) as n,
        lateral (select clock_timestamp() - n * interval '89 days' / %(total)s as made) as times
"""


@pytest.fixture(autouse=True)
def at_work(database, monkeypatch):
    """The settings that an operator has who set none of the brakes."""
    monkeypatch.delenv("FORGEKEEPER_BREAKER_SHARE")
    agree()


def fill(batch, sql, total):
    """Add rows to a batch that has run for days."""
    db.execute_sql(sql, {"total": total})
    db.execute_sql("analyze user_statuses, ci_job_artifacts")
    lived(batch, range(300, 3 * 86_400, 300), 3)


def test_a_bad_import_makes_all_statuses_expire(database):
    fill(STATUSES, STATUS_ROWS, MANY)
    UserStatus.update(clear_status_at=now() - DAY).where(pw.fn.mod(UserStatus.user_id, 10) != 0).execute()

    assert (recorded(STATUSES, settings_with()).reason, UserStatus.select().count()) == ("held", MANY)
    assert JobRun.start_here(STATUSES.name, by="the next tick") is None


def test_a_retention_is_changed_from_ninety_days_to_nine(database):
    fill(ARTIFACTS, ARTIFACT_ROWS, FEW)
    FeatureFlag.turn(FLAG, on=True)
    db.execute_sql("update ci_job_artifacts set expire_at = created_at + interval '9 days'")

    row = recorded(ARTIFACTS, settings_with())

    assert (row.reason, row.result["children_enqueued"]) == ("held", 0)
    assert Hold.why(ARTIFACTS.name) == "held"
