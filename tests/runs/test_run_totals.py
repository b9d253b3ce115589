"""What a run has deleted is written down once, however it ends: the breaker and previews go by it."""

import pytest

from demo.sample_data import add_statuses as sample
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.totals import RunTotal
from models import UserStatus
from tests.harness.every import every
from tests.harness.performing import attempt_at, recorded, runner_of
from tests.harness.settings import settings_with
from workers.expired_job_artifacts import delete_artifact_bucket
from workers.user_status_cleanup import user_status_cleanup

DUE = 200
"""Of five hundred sample statuses."""

pytestmark = pytest.mark.usefixtures("database")


class Broken(Exception):
    """What ends a run in the middle of it."""


def totals():
    return [(one.batch, one.run, one.records, one.bytes, one.reserved) for one in RunTotal.select()]


@every("limit", [None, 1_000], name=str)
def test_a_run_that_ends_well_is_added_up_once_with_a_limit_or_without(limit):
    RunTotal.delete().execute()
    UserStatus.delete().execute()
    sample(500)

    row = recorded(user_status_cleanup, settings_with(max_per_run_user_status_cleanup=limit))

    assert totals() == [("user_status_cleanup", row.id, DUE, 0, 0)]


def test_what_a_run_had_deleted_before_it_failed_is_added_up():
    with runner_of(settings_with()) as runner, attempt_at(runner, user_status_cleanup) as attempt:
        attempt.run.outcome.deleted = 7
        raise Broken

    assert totals() == [("user_status_cleanup", attempt.run.number, 7, 0, 0)]


def test_what_a_child_has_deleted_is_added_to_the_newest_run_of_its_batch():
    JobRun.start_here("expired_job_artifacts", by="me")
    newest = JobRun.get()
    for destroyed in (3, 4):
        with runner_of(settings_with()) as runner, runner.child(delete_artifact_bucket, "1", run=12) as attempt:
            attempt.work()
            attempt.run.outcome.destroyed, attempt.run.outcome.bytes = destroyed, 10

    assert totals() == [("expired_job_artifacts", newest.id, 7, 20, 0)]
