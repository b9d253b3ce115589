"""Insert many due statuses and artifacts, delete them by runs, and list the remaining rows."""

from datetime import timedelta

from forgekeeper.guards.deadline import Deadline
from forgekeeper.platform.database import database
from models import ProjectStatistics
from tests.harness.artifacts import BUCKETS, run, turn_on
from tests.harness.performing import perform
from workers.user_status_cleanup import user_status_cleanup

BUDGET = timedelta(minutes=5)
ADD_STATUSES = """
    insert into user_statuses (user_id, clear_status_at)
    select n, now() - interval '1 day' + n * interval '1 millisecond' from generate_series(%s, %s) as n
"""
ADD_ARTIFACTS = """
    insert into ci_job_artifacts (id, project_id, job_id, file_type, file_final_path, size, expire_at, locked)
    select n, 1, 10 * n - 1, 1, 'due/' || n, 10, now() - interval '1 day' + n * interval '1 millisecond', 0
    from generate_series(1, %s) as n
"""


def statuses(count, *, first=1):
    """Insert due statuses; a higher id became due later."""
    database.execute_sql(ADD_STATUSES, (first, first + count - 1))


def artifacts(count, *, size=10):
    database.execute_sql(ADD_ARTIFACTS, (count,))
    ProjectStatistics.create(project_id=1, build_artifacts_size=1_000 + size * count)


def ids(model):
    return {row for (row,) in model.select(model._meta.primary_key).tuples()}


def clean_statuses(**options):
    return perform(user_status_cleanup, deadline=Deadline(BUDGET, **options))


def destroy_artifacts():
    turn_on()
    return sum(run().destroyed for _ in range(BUCKETS))
