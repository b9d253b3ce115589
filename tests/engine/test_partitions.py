"""A forge may cut its tables into partitions: a statement reads those of its rows, and a row may move meanwhile."""

import pytest

from forgekeeper.engine.statement import RowChunk, RowStatements
from forgekeeper.platform.database import database, now
from forgekeeper.platform.database.queries import START_POSITION
from models import JobArtifact
from tests.harness.many_rows import artifacts, destroy_artifacts, ids
from tests.harness.settings import settings_with
from workers.expired_job_artifacts import delete_artifact_bucket

PARTED = """
    create schema parted;
    create table parted.ci_job_artifacts (like public.ci_job_artifacts including defaults, primary key (id, partition_id))
        partition by list (partition_id);
    create table parted.first partition of parted.ci_job_artifacts for values in (100, 101);
    create table parted.second partition of parted.ci_job_artifacts for values in (102);
    set search_path = forgekeeper, parted, public
"""


@pytest.fixture
def parted(database):
    """The artifacts' table has two partitions, of three values."""
    database.execute_sql(PARTED)
    yield
    database.execute_sql("reset search_path; drop schema parted cascade")


def moved(to, which):
    return f"update ci_job_artifacts set partition_id = {to} where {which}"


def plans(node):
    yield node
    for below in node.get("Plans", ()):
        yield from plans(below)


@pytest.mark.usefixtures("parted")
def test_rows_of_all_partitions_go_and_no_other_does():
    artifacts(30)
    database.execute_sql(moved(102, "id > 10"))
    database.execute_sql("update ci_job_artifacts set expire_at = now() + interval '1 day' where id > 25")

    assert destroy_artifacts() == 25
    assert ids(JobArtifact) == {26, 27, 28, 29, 30}


@pytest.mark.usefixtures("parted")
def test_the_deletion_looks_into_the_partitions_of_its_rows_alone():
    artifacts(10)
    (due,) = delete_artifact_bucket.shown_rows[0](now(), settings_with())
    statements = RowStatements(due)
    values = statements.sql_values | START_POSITION._asdict()

    with database.atomic() as transaction:
        ((((plan),),),) = database.execute_sql(
            f"explain (analyze, format json) {statements.write_delete(RowChunk(limit=100))}", values
        ).fetchall()
        transaction.rollback()

    deleted = next(node for node in plans(plan["Plan"]) if node.get("Operation") == "Delete")
    scans = [node for node in plans(deleted) if "Scan" in node["Node Type"] and "Relation Name" in node]
    read = {node["Relation Name"]: node["Actual Loops"] for node in scans}
    # Nothing is excluded, which is asked once.
    assert read == {"first": 1, "second": 0, "exclusions": 0}


@pytest.mark.usefixtures("parted")
def test_a_row_that_is_moving_to_another_partition_stays_for_a_later_run_and_goes_once(other):
    artifacts(3)
    other.execute("set search_path = parted; " + moved(102, "id = 2"))

    assert destroy_artifacts() == 2
    other.connection.commit()
    assert (ids(JobArtifact), destroy_artifacts(), ids(JobArtifact)) == ({2}, 1, set())
