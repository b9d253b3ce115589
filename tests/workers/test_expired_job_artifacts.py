"""Batch 11 against a real PostgreSQL and Redis, with users who keep their artifacts meanwhile."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from forgekeeper.engine.total_locks import TOTALS_LOCK_CLASS
from forgekeeper.platform.database import database, now
from forgekeeper.platform.database.queries import START_POSITION, WALK_IN_ORDER
from models import CLASS_COUNT, ProjectStatistics
from tests.harness.artifacts import (
    NO_GRACE,
    NOON,
    artifact,
    chunk_statement,
    destroy_chunk,
    due_artifacts,
    ids,
    list_plan_nodes,
    outbox,
    run,
    statistics,
    turn_on,
)
from tests.harness.tables import before_each, somebody_waits_for_a_lock, wait_for_locks
from tests.harness.thorough import whole_only
from tests.harness.waiting import wait_until
from workers.expired_job_artifacts import BATCH_SIZE

DUE, FEW = 40_000, 1_500
BUCKETS, MANY_BUCKETS = 5, 10
LOCKED, UNKNOWN, TRACE = 1, 2, 3

KEEPING = ["expire_at = null", "locked = 1", "expire_at = now() + interval '1 day'"]

pytestmark = pytest.mark.usefixtures("database")


def destroy(number=0, *, after=START_POSITION, limit=BATCH_SIZE, grace=NO_GRACE):
    return destroy_chunk(number, NOON, after=after, limit=limit, grace=grace)


def rows_read(after):
    """Destroy a batch and undo it; return how many artifacts each of its scans came across, dead ones aside."""
    statement, values = chunk_statement(0, now())
    with database.atomic() as transaction:
        explained = f"{WALK_IN_ORDER} explain (analyze, format json) {statement}"
        ((plans,),) = database.execute_sql(explained, values | after._asdict()).fetchall()
        transaction.rollback()
    scans = [node for node in list_plan_nodes(plans[0]["Plan"]) if node.get("Relation Name") == "ci_job_artifacts"]
    kinds = ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Index Recheck")
    return [sum(int(scan.get(kind, 0)) for kind in kinds) for scan in scans if "Scan" in scan["Node Type"]]


@pytest.mark.parametrize(
    "facts",
    [
        {"locked": LOCKED},
        {"locked": UNKNOWN},
        {"locked": None},
        {"file_type": TRACE},
        {"expire_at": NOON},
        {"expire_at": None},
    ],
)
def test_a_locked_an_unknown_a_trace_and_an_unexpired_artifact_are_never_destroyed(facts):
    kept = artifact(**facts)

    batch = destroy()

    assert (batch.artifacts, batch.reached, ids(), outbox()) == (0, None, {kept}, [])


@pytest.mark.parametrize("modulus", [BUCKETS, MANY_BUCKETS])
def test_the_buckets_are_disjoint_and_leave_nothing_out(modulus):
    turn_on(high_concurrency=modulus == MANY_BUCKETS)
    class_of = {artifact(number=number, project=4, path=f"a/{number}"): number for number in range(CLASS_COUNT)}
    destroyed = {}
    for _ in range(modulus):
        before = ids()
        outcome = run()
        destroyed[outcome.bucket] = {class_of[gone] for gone in before - ids()}

    assert destroyed == {
        bucket: {number for number in range(CLASS_COUNT) if number % modulus == bucket} for bucket in range(modulus)
    }


@pytest.mark.parametrize(
    "path",
    ["a", "a/b", "@final/ab/cd/0123", "/a", "/a/b", "//a", "a/", "a//b", "/", "a:b/c:d", ":", "with space/ü"],
)
def test_the_outbox_names_exactly_the_path_of_the_artifact(path):
    artifact(path=path)

    destroy()

    assert outbox() == [path]


def test_an_artifact_that_was_not_deleted_is_not_taken_off():
    ProjectStatistics.create(project_id=1, build_artifacts_size=100)
    stubborn = artifact(size=1)
    artifact(size=10)

    with before_each("delete", "ci_job_artifacts", f"if old.id = {stubborn} then return null; end if"):
        batch = destroy()

    assert (batch.artifacts, batch.bytes, len(outbox()), statistics()) == (1, 10, 1, 90)


def test_statistics_that_change_meanwhile_lose_nothing_else(other):
    ProjectStatistics.create(project_id=1, build_artifacts_size=100)
    artifact(size=10)
    # As another child does: ours waits for its turn, with what it has seen of the statistics until then.
    other.execute("select pg_advisory_xact_lock(%s, hashint8(1))", (TOTALS_LOCK_CLASS,))
    other.execute("update project_statistics set build_artifacts_size = build_artifacts_size + 1000")

    def destroy_in_a_thread():
        with database.connection_context():
            wait_for_locks()
            return destroy()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(destroy_in_a_thread)
        waited = wait_until(somebody_waits_for_a_lock, 20)
        other.connection.commit()
        batch = running.result()

    assert (waited, batch.artifacts, statistics()) == (True, 1, 1090)


LOCK_STATISTICS = "select 1 from project_statistics where project_id = %s for update"


def test_artifacts_whose_statistics_are_locked_wait_and_no_others_do(other):
    for project in (1, 2, 3):
        artifact(project=project, path=str(project))
    for project in (1, 2):
        ProjectStatistics.create(project_id=project, build_artifacts_size=100)
    other.execute(LOCK_STATISTICS, (2,))

    # A statement that waits for the lock fails with another error than a lock's.
    database.execute_sql("set lock_timeout = 0; set statement_timeout = '10s'")
    try:
        batch = destroy()
    finally:
        database.execute_sql("reset lock_timeout; reset statement_timeout")

    assert (batch.artifacts, batch.held_up, outbox()) == (2, [2], ["1", "3"])
    assert (statistics(1), statistics(2)) == (90, 100)


def test_a_child_that_is_still_deleting_holds_up_no_other_child_of_its_projects(other):
    slow, quick = artifact(number=0, path="slow"), artifact(number=1, path="quick")
    ProjectStatistics.create(project_id=1, build_artifacts_size=100)
    other.execute("select pg_advisory_lock(1)")

    def destroy_slowly():
        with database.connection_context():
            wait_for_locks()
            return destroy(0)

    act = f"if old.id = {slow} then perform pg_advisory_xact_lock_shared(1); end if"
    with before_each("delete", "ci_job_artifacts", act), ThreadPoolExecutor(1) as pool:
        destroying = pool.submit(destroy_slowly)
        waited = wait_until(somebody_waits_for_a_lock, 20)
        batch, left = destroy(1), ids()
        other.execute("select pg_advisory_unlock(1)")
        destroying.result()

    assert (waited, batch.artifacts, quick in left, slow in left) == (True, 1, False, True)
    assert (ids(), statistics()) == (set(), 80)


# Must not happen: batches that slow down with what there is to do


@whole_only
@pytest.mark.parametrize("known", ["nothing", "an empty table", "that nothing is due", "that few are due", "all"])
def test_a_batch_reads_no_more_than_it_destroys_whatever_postgresql_knows(known):
    due_artifacts(DUE, step=1)
    if known == "nothing":
        database.execute_sql("delete from pg_statistic where starelid = 'ci_job_artifacts'::regclass")
    elif known == "an empty table":
        database.execute_sql("truncate ci_job_artifacts")
    elif known != "all":
        change = "set expire_at = now() + interval '1 year' where id > %s"
        database.execute_sql(f"update ci_job_artifacts {change}", (FEW if known == "that few are due" else 0,))
    if known != "nothing":
        database.execute_sql("analyze ci_job_artifacts")
    due_artifacts(DUE, first=DUE + 1, step=1)

    first = rows_read(START_POSITION)
    reached = destroy_chunk(0, now()).reached

    assert (first, rows_read(reached)) == ([BATCH_SIZE, BATCH_SIZE], [BATCH_SIZE, BATCH_SIZE])


@pytest.mark.parametrize("change", KEEPING)
def test_an_artifact_that_was_kept_survives(other, change):
    turn_on()
    due_artifacts(3)
    other.execute(f"update ci_job_artifacts set {change} where id = 2")
    for _ in range(BUCKETS):
        run()
    other.connection.commit()

    for _ in range(BUCKETS):
        run()

    assert ids() == {2}
