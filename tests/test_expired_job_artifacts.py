"""Batch 11 against a real PostgreSQL and Redis, with users who keep their artifacts meanwhile."""

import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta

import peewee as pw
import psycopg2
import pytest
from structlog.testing import capture_logs

from forgekeeper import shutdown
from forgekeeper.connections import client
from forgekeeper.database import database, now
from forgekeeper.database.chunks import IN_ORDER, START
from forgekeeper.deleting.total import TURNS
from forgekeeper.delivery.queues import depth
from forgekeeper.flags import FeatureFlag
from forgekeeper.process.broker import broker
from forgekeeper.runs.blocked import Blocked
from forgekeeper.runs.deadline import Deadline
from forgekeeper.storage.outbox import DeletedObject
from models import CLASSES, JobArtifact, ProjectStatistics
from tests.harness.artifacts import NO_GRACE, chunk_statement, destroy_chunk
from tests.harness.clocks import Clock, Crash, crash
from tests.harness.performing import perform, recorded
from tests.harness.settings import settings_with
from tests.harness.thorough import examples
from tests.harness.waiting import wait_until
from workers import expired_job_artifacts
from workers.expired_job_artifacts import (
    FLAG,
    HIGH_CONCURRENCY_FLAG,
    LOOP_LIMIT,
    MAX_RUNTIME,
    BucketOutcome,
    buckets,
)
from workers.expired_job_artifacts.destroying import BATCH_SIZE

NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
HOUR = timedelta(hours=1)
MICROSECOND = timedelta(microseconds=1)
KEEPS = examples(2_000)
DUE, FEW = 40_000, 1_500
BUCKETS, MANY_BUCKETS = 5, 10
ARTIFACTS, PROJECTS = examples(200_000), 97
FLIP_EVERY = 0.2
PATIENCE = 120.0
UNLOCKED, LOCKED, UNKNOWN = 0, 1, 2
ARCHIVE, TRACE = 1, 3

# Deletable ones only, of class 0 unless *step* is 1; the higher the id, the later they expired.
ADD_DUE = """
    insert into ci_job_artifacts (id, project_id, job_id, file_type, file_final_path, size, expire_at, locked)
    select id, 1 + mod(id, 7), {step} * id - 1 - mod(id, 7), 1, 'due/' || id, id,
        now() - interval '30 days' + id * interval '1 millisecond', 0
    from generate_series({first}, {last}) as id
"""
# Something of everything: traces, locked and unknown ones, fresh ones and those that are never due.
ADD_MIXED = """
    insert into ci_job_artifacts (id, project_id, job_id, file_type, file_store, file_final_path, size, expire_at, locked)
    select id, 1 + mod(id, {projects}), id / 3, case when mod(id, 11) = 0 then 3 else 1 end, 1 + mod(id, 2),
        'ab/' || mod(id, 256) || '/' || id,
        case when mod(id, 13) = 0 then null else mod(id * 7919, 1000003) end,
        case mod(id, 5) when 0 then now() + interval '1 day' when 1 then null
            else now() - interval '30 days' + id * interval '1 millisecond' end,
        case mod(id, 17) when 0 then 1 when 1 then 2 else 0 end
    from generate_series(1, {count}) as id
"""
ADD_STATISTICS = """
    insert into project_statistics (project_id, build_artifacts_size)
    select project_id, 1000 + coalesce(sum(size), 0) from ci_job_artifacts group by project_id
"""
DELETABLE = "expire_at < now() and locked = 0 and file_type <> 3"
SURVIVORS = f"""
    select count(*), bit_xor(hashtextextended(artifact::text, 1)) from ci_job_artifacts as artifact
    where not coalesce({DELETABLE}, false)
"""
# Statistics that differ from the sum of the artifacts that are left, to the byte.
WRONG_STATISTICS = """
    select project_id, build_artifacts_size, left_over from project_statistics
    left join (select project_id, sum(size) as left_over from ci_job_artifacts group by project_id) as artifacts
        using (project_id)
    where build_artifacts_size <> 1000 + coalesce(left_over, 0)
"""
# One that the children will come to next, or are at.
KEEP_ANY = """
    update ci_job_artifacts set {change}
    where id = (
        select id from ci_job_artifacts where {deletable} and mod(project_id + job_id, 10) = %s
        order by expire_at, id offset %s limit 1
    ) and {deletable}
    returning id
"""
WAITING_FOR_A_LOCK = "select 1 from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
KEEPING = ["expire_at = null", "locked = 1", "expire_at = now() + interval '1 day'"]

pytestmark = pytest.mark.usefixtures("database")


def artifact(*, number=0, size=10, path="ab/cd/artifact", project=1, expire_at=NOON - HOUR, **facts):
    """Add an artifact of class *number*."""
    return JobArtifact.create(
        project_id=project,
        job_id=10 * project + number - project,
        file_final_path=path,
        size=size,
        expire_at=expire_at,
        **{"locked": UNLOCKED, "file_type": ARCHIVE} | facts,
    ).id


def due_artifacts(count, *, first=1, step=CLASSES):
    database.execute_sql(ADD_DUE.format(first=first, last=first + count - 1, step=step))


def mixed_artifacts(count):
    database.execute_sql(ADD_MIXED.format(count=count, projects=PROJECTS))
    database.execute_sql(ADD_STATISTICS)
    database.execute_sql("analyze ci_job_artifacts, project_statistics")


def destroy(number=0, *, after=START, limit=BATCH_SIZE, grace=NO_GRACE):
    return destroy_chunk(number, NOON, after=after, limit=limit, grace=grace)


def ids():
    return {row.id for row in JobArtifact.select(JobArtifact.id)}


def outbox():
    return sorted(row.path for row in DeletedObject.select())


def statistics(project=1):
    return ProjectStatistics.get_by_id(project).build_artifacts_size


def rows(sql):
    return database.execute_sql(sql).fetchall()


def count(condition):
    return rows(f"select count(*) from ci_job_artifacts where {condition}")[0][0]


def rows_read(after):
    """Destroy a batch and undo it; return how many artifacts each of its scans came across, dead ones aside."""
    statement, values = chunk_statement(0, now())
    with database.atomic() as transaction:
        explained = f"{IN_ORDER} explain (analyze, format json) {statement}"
        ((plans,),) = database.execute_sql(explained, values | after._asdict()).fetchall()
        transaction.rollback()
    scans = [node for node in nodes(plans[0]["Plan"]) if node.get("Relation Name") == "ci_job_artifacts"]
    kinds = ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Index Recheck")
    return [sum(int(scan.get(kind, 0)) for kind in kinds) for scan in scans if "Scan" in scan["Node Type"]]


def nodes(plan):
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def turn_on(*, high_concurrency=False):
    """Turn the flags on and make the buckets, as the parent does."""
    FeatureFlag.turn(FLAG, on=True)
    FeatureFlag.turn(HIGH_CONCURRENCY_FLAG, on=high_concurrency)
    buckets.tidy(client, MANY_BUCKETS if high_concurrency else BUCKETS)


def run(**options):
    deadline, settings = Deadline(MAX_RUNTIME, **options), settings_with(object_grace=NO_GRACE)
    return perform(expired_job_artifacts.delete_artifact_bucket, deadline=deadline, settings=settings)


def all_free(number=BUCKETS):
    return buckets.available(client) == list(range(number)) and buckets.held(client) == []


@pytest.fixture
def parent(settings):
    """Run the parent as a worker does; return the row of its run."""
    return lambda: recorded(expired_job_artifacts.expired_job_artifacts, settings)


@pytest.fixture
def say(capfd):
    """Print figures past pytest's capture."""

    def write(sentence):
        with capfd.disabled():
            sys.stdout.write(f"\n{sentence}\n")

    return write


@contextmanager
def on_deletion(act):
    """Let PostgreSQL do something before it deletes an artifact."""
    database.execute_sql(
        f"create function spoil() returns trigger language plpgsql as $$ begin {act}; return old; end $$"
    )
    database.execute_sql("create trigger spoil before delete on ci_job_artifacts for each row execute function spoil()")
    try:
        yield
    finally:
        database.execute_sql("drop function spoil cascade")


@contextmanager
def without(table):
    database.execute_sql(f"alter table {table} rename to away")
    try:
        yield
    finally:
        database.execute_sql(f"alter table away rename to {table}")


# What is destroyed


def test_with_nothing_to_do_nothing_is_done():
    turn_on()

    outcome = run()

    assert outcome == BucketOutcome(0, 0, 0, "drained")


@pytest.mark.parametrize(
    ("expire_at", "expired"),
    [(NOON - MICROSECOND, True), (NOON, False), (NOON + MICROSECOND, False), (None, False)],
    ids=["a microsecond ago", "exactly now", "a microsecond later", "never"],
)
def test_an_artifact_is_destroyed_after_its_moment_and_not_at_it(expire_at, expired):
    artifact(expire_at=expire_at)

    counted = JobArtifact.expired(NOON).count()
    batch = destroy()

    assert (counted, batch.artifacts, len(ids())) == ((1, 1, 0) if expired else (0, 0, 1))


@pytest.mark.parametrize("facts", [{"locked": LOCKED}, {"locked": UNKNOWN}, {"file_type": TRACE}])
def test_a_locked_an_unknown_and_a_trace_are_never_destroyed(facts):
    kept = artifact(**facts)

    batch = destroy()

    assert (batch.artifacts, batch.reached, ids(), outbox()) == (0, None, {kept}, [])


def test_an_artifact_that_nobody_has_called_unlocked_is_never_destroyed():
    JobArtifact.create(project_id=1, job_id=9, file_type=1, file_final_path="a", expire_at=NOON - HOUR)

    assert destroy().artifacts == 0


def test_the_oldest_go_first():
    young, old = artifact(expire_at=NOON - HOUR), artifact(expire_at=NOON - 2 * HOUR)

    destroy(limit=1)

    assert (young in ids(), old in ids()) == (True, False)


@pytest.mark.parametrize("number", [1, BATCH_SIZE - 1, BATCH_SIZE, BATCH_SIZE + 1, 2 * BATCH_SIZE + 1])
def test_a_child_drains_its_bucket_whatever_number_there_is(number):
    turn_on()
    due_artifacts(number)

    outcome = run()

    assert outcome == BucketOutcome(0, number, number * (number + 1) // 2, "drained")
    assert (ids(), len(outbox())) == (set(), number)


def test_of_equally_old_ones_none_is_forgotten_between_two_batches():
    turn_on()
    due_artifacts(2 * BATCH_SIZE + 1)
    database.execute_sql("update ci_job_artifacts set expire_at = now() - interval '1 day'")

    run()

    assert ids() == set()


@pytest.mark.parametrize("modulus", [BUCKETS, MANY_BUCKETS])
def test_the_buckets_are_disjoint_and_leave_nothing_out(modulus):
    turn_on(high_concurrency=modulus == MANY_BUCKETS)
    class_of = {artifact(number=number, project=4, path=f"a/{number}"): number for number in range(CLASSES)}
    destroyed = {}
    for _ in range(modulus):
        before = ids()
        outcome = run()
        destroyed[outcome.bucket] = {class_of[gone] for gone in before - ids()}

    assert destroyed == {
        bucket: {number for number in range(CLASSES) if number % modulus == bucket} for bucket in range(modulus)
    }


# What is recorded


@pytest.mark.parametrize(
    "path",
    ["a", "a/b", "@final/ab/cd/0123", "/a", "/a/b", "//a", "a/", "a//b", "/", "a:b/c:d", ":", "with space/ü"],
)
def test_the_outbox_names_exactly_the_path_of_the_artifact(path):
    artifact(path=path)

    destroy()

    assert outbox() == [path]


@pytest.mark.parametrize("path", ["a", "a/b", "/a", "/a/b", "a/", "a:b/c:d"])
def test_an_object_in_the_outbox_is_found_by_its_path(path):
    artifact(path=path)
    destroy()

    assert DeletedObject.named([path]) == {path}


def test_of_many_paths_only_those_in_the_outbox_are_found():
    for path in ("a/b", "c"):
        artifact(path=path)
    destroy()

    assert DeletedObject.named(["x", "c", "a", "b", "a/c", "a/b"]) == {"c", "a/b"}


def test_the_outbox_does_not_name_a_path_without_the_slash_it_began_with():
    artifact(path="/a")
    destroy()

    assert DeletedObject.named(["a"]) == set()


def test_the_outbox_carries_the_project_and_the_store():
    artifact(project=1, file_store=2)

    destroy()

    (row,) = DeletedObject.select()
    assert (row.project_id, row.file_store, row.attempts) == (1, 2, 0)


def test_an_object_is_due_after_the_grace():
    artifact()

    destroy(grace=HOUR)

    assert [row.pick_up_at for row in DeletedObject.select()] == [NOON + HOUR]


def test_two_artifacts_of_one_path_are_recorded_twice():
    artifact(path="same")
    artifact(path="same")

    destroy()

    assert outbox() == ["same", "same"]


# Must not happen: statistics decremented twice, or not at all


def test_the_statistics_lose_exactly_the_bytes_that_are_gone():
    mixed_artifacts(5_000)
    turn_on()
    bytes_before = rows("select sum(build_artifacts_size) from project_statistics")[0][0]

    outcomes = [run() for _ in range(BUCKETS)]

    bytes_after = rows("select sum(build_artifacts_size) from project_statistics")[0][0]
    assert rows(WRONG_STATISTICS) == []
    assert sum(outcome.bytes for outcome in outcomes) == bytes_before - bytes_after > 0


def test_an_artifact_without_a_size_takes_nothing_off():
    ProjectStatistics.create(project_id=1, build_artifacts_size=7)
    artifact(size=None)

    batch = destroy()

    assert (batch.artifacts, batch.bytes, statistics()) == (1, 0, 7)


def test_more_bytes_than_an_integer_holds_are_taken_off_to_the_byte():
    ProjectStatistics.create(project_id=1, build_artifacts_size=2**40 + 1)
    artifact(size=2**39)
    artifact(size=2**39)

    batch = destroy()

    assert (batch.bytes, statistics()) == (2**40, 1)


def test_a_project_without_statistics_keeps_no_artifact():
    artifact()

    assert destroy().artifacts == 1


def test_a_batch_that_fails_takes_nothing_off():
    ProjectStatistics.create(project_id=1, build_artifacts_size=100)
    kept = artifact()

    with on_deletion("raise exception 'spoilt'"), pytest.raises(pw.InternalError):
        destroy()

    assert (ids(), outbox(), statistics()) == ({kept}, [], 100)


def test_a_batch_whose_objects_cannot_be_recorded_destroys_nothing():
    ProjectStatistics.create(project_id=1, build_artifacts_size=100)
    kept = artifact()

    with without("ci_deleted_objects"), pytest.raises(pw.ProgrammingError):
        destroy()

    assert (ids(), statistics()) == ({kept}, 100)


def test_an_artifact_that_was_not_deleted_is_not_taken_off():
    ProjectStatistics.create(project_id=1, build_artifacts_size=100)
    stubborn = artifact(size=1)
    artifact(size=10)

    with on_deletion(f"if old.id = {stubborn} then return null; end if"):
        batch = destroy()

    assert (batch.artifacts, batch.bytes, len(outbox()), statistics()) == (1, 10, 1, 90)


def test_statistics_that_change_meanwhile_lose_nothing_else(other):
    ProjectStatistics.create(project_id=1, build_artifacts_size=100)
    artifact(size=10)
    # As another child does: ours waits for its turn, with what it has seen of the statistics until then.
    other.execute("select pg_advisory_xact_lock(%s, hashint8(1))", (TURNS,))
    other.execute("update project_statistics set build_artifacts_size = build_artifacts_size + 1000")

    def destroy_in_a_thread():
        with database.connection_context():
            return destroy()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(destroy_in_a_thread)
        waited = wait_until(lambda: bool(rows(WAITING_FOR_A_LOCK)), 20)
        other.connection.commit()
        batch = running.result()

    assert (waited, batch.artifacts, statistics()) == (True, 1, 1090)


# Must not happen: a project whose statistics somebody has locked stops the others


LOCK_STATISTICS = "select 1 from project_statistics where project_id = %s for update"


def children(number):
    """Let so many children work at once; return their outcomes."""
    together = threading.Barrier(number, timeout=30)

    def child():
        with database.connection_context():
            together.wait()
            return run()

    with ThreadPoolExecutor(number) as pool:
        return [each.result() for each in [pool.submit(child) for _ in range(number)]]


def test_artifacts_whose_statistics_are_locked_wait_and_no_others_do(other):
    for project in (1, 2, 3):
        artifact(project=project, path=str(project))
    for project in (1, 2):
        ProjectStatistics.create(project_id=project, build_artifacts_size=100)
    other.execute(LOCK_STATISTICS, (2,))

    batch = destroy()

    assert (batch.artifacts, batch.held_up, outbox()) == (2, [2], ["1", "3"])
    assert (statistics(1), statistics(2)) == (90, 100)


def test_a_child_that_is_still_deleting_holds_up_no_other_child_of_its_projects(other):
    slow, quick = artifact(number=0, path="slow"), artifact(number=1, path="quick")
    ProjectStatistics.create(project_id=1, build_artifacts_size=100)
    other.execute("select pg_advisory_lock(1)")

    def destroy_slowly():
        with database.connection_context():
            return destroy(0)

    act = f"if old.id = {slow} then perform pg_advisory_xact_lock_shared(1); end if"
    with on_deletion(act), ThreadPoolExecutor(1) as pool:
        destroying = pool.submit(destroy_slowly)
        waited = wait_until(lambda: bool(rows(WAITING_FOR_A_LOCK)), 20)
        batch, left = destroy(1), ids()
        other.execute("select pg_advisory_unlock(1)")
        destroying.result()

    assert (waited, batch.artifacts, quick in left, slow in left) == (True, 1, False, True)
    assert (ids(), statistics()) == (set(), 80)


def test_ten_children_destroy_at_full_speed_what_is_not_locked(other, say):
    turn_on(high_concurrency=True)
    due_artifacts(3_000, step=1)
    database.execute_sql(ADD_STATISTICS)
    locked = count("project_id = 3")
    other.execute(LOCK_STATISTICS, (3,))
    began = time.monotonic()

    outcomes = children(MANY_BUCKETS)

    seconds = time.monotonic() - began
    say(f"ten children destroyed {3_000 - locked:,} of 3,000 artifacts beside a locked project in {seconds:.1f} s")
    assert {outcome.stopped for outcome in outcomes} == {"drained"}
    assert (count("project_id <> 3"), count("project_id = 3"), rows(WRONG_STATISTICS)) == (0, locked, [])


def test_what_was_locked_goes_in_the_next_run(other):
    turn_on(high_concurrency=True)
    due_artifacts(3_000, step=1)
    database.execute_sql(ADD_STATISTICS)
    other.execute(LOCK_STATISTICS, (3,))
    children(MANY_BUCKETS)
    other.connection.rollback()

    children(MANY_BUCKETS)

    assert (ids(), rows(WRONG_STATISTICS)) == (set(), [])


def test_a_child_waits_once_for_a_locked_project_and_for_no_more_than_that(other):
    turn_on()
    due_artifacts(3_000, step=1)
    database.execute_sql(ADD_STATISTICS)
    other.execute("select 1 from project_statistics where project_id > 1 for update")
    began = time.monotonic()

    run()

    # The lock timeout is a second; there are six projects that are locked, and two classes in a bucket.
    assert time.monotonic() - began < 5
    assert count("project_id = 1 and mod(project_id + job_id, 5) = 0") == 0


def test_a_project_that_is_locked_for_a_moment_goes_in_the_same_run(other):
    turn_on()
    due_artifacts(3 * BATCH_SIZE)
    database.execute_sql(ADD_STATISTICS)
    other.execute("select 1 from project_statistics for update")

    def run_in_a_thread():
        with database.connection_context():
            return run()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_in_a_thread)
        waited = wait_until(lambda: bool(rows(WAITING_FOR_A_LOCK)), 20)
        other.connection.rollback()
        outcome = running.result()

    assert (waited, outcome.destroyed, outcome.stopped) == (True, 3 * BATCH_SIZE, "drained")


def test_what_is_locked_does_not_use_up_the_loops(other):
    turn_on()
    due_artifacts(10 * BATCH_SIZE)
    database.execute_sql("update ci_job_artifacts set project_id = 1, job_id = 9 where id <= %s", (9 * BATCH_SIZE,))
    database.execute_sql("update ci_job_artifacts set project_id = 2, job_id = 8 where id > %s", (9 * BATCH_SIZE,))
    database.execute_sql(ADD_STATISTICS)
    other.execute(LOCK_STATISTICS, (1,))
    safe_points = []

    outcome = run(safe_point=lambda: safe_points.append(1))

    assert (outcome.destroyed, len(safe_points)) == (BATCH_SIZE, 2)


# Must not happen: an artifact that its user has just decided to keep is destroyed


@pytest.mark.parametrize("change", KEEPING)
def test_an_artifact_that_is_being_kept_is_skipped(other, change):
    turn_on()
    due_artifacts(3)
    other.execute(f"update ci_job_artifacts set {change} where id = 2")

    outcome = run()

    assert (outcome.destroyed, ids(), len(outbox())) == (2, {2}, 2)


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


def test_an_artifact_that_was_not_kept_after_all_is_destroyed_by_the_next_child(other):
    turn_on()
    due_artifacts(3)
    other.execute("update ci_job_artifacts set expire_at = null where id = 2")
    for _ in range(BUCKETS):
        run()
    other.connection.rollback()

    for _ in range(BUCKETS):
        run()

    assert ids() == set()


def test_artifacts_kept_in_thousands_of_interleavings_all_survive(urls):
    turn_on(high_concurrency=True)
    kept, too_late, running, ended = set(), [], threading.Event(), threading.Event()

    def keep():
        with closing(psycopg2.connect(urls.database)) as connection, connection.cursor() as cursor:
            connection.autocommit = True
            while not ended.is_set():
                running.wait(1)
                statement = KEEP_ANY.format(change=random.choice(KEEPING), deletable=DELETABLE)
                cursor.execute(statement, (random.randrange(CLASSES), random.randrange(BATCH_SIZE)))
                row = cursor.fetchone()
                if row is None:
                    too_late.append(1)
                else:
                    kept.add(row[0])

    def child():
        with database.connection_context():
            return run().destroyed

    destroyed = added = 0
    with ThreadPoolExecutor(2) as users, ThreadPoolExecutor(3) as workers:
        keeping = [users.submit(keep) for _ in range(2)]
        try:
            while len(kept) < KEEPS and not any(user.done() for user in keeping):
                due_artifacts(3_000, first=added + 1, step=1)
                added += 3_000
                running.set()
                destroyed += sum([each.result() for each in [workers.submit(child) for _ in range(MANY_BUCKETS)]])
                running.clear()
        finally:
            ended.set()
            running.set()
        for user in keeping:
            user.result()
    destroyed += sum(run().destroyed for _ in range(MANY_BUCKETS))

    assert len(kept) >= KEEPS
    assert too_late, "nobody ever came too late: the children and the users were not at the same rows"
    assert ids() == kept
    assert destroyed == added - len(kept) == len(outbox())


# Must not happen: the same hundred rows are fetched again and again


def test_rows_that_stay_are_fetched_once_by_a_child():
    turn_on()
    due_artifacts(3 * BATCH_SIZE)
    safe_points = []

    with on_deletion("return null"):
        outcome = run(safe_point=lambda: safe_points.append(1))

    assert (outcome, len(safe_points)) == (BucketOutcome(0, 0, 0, "drained"), 3)


def test_a_batch_begins_behind_the_one_before():
    artifact(path="first", expire_at=NOON - 2 * HOUR)
    artifact(path="second", expire_at=NOON - HOUR)
    first = destroy(limit=1)

    second = destroy(after=first.reached, limit=1)

    assert (outbox(), second.reached > first.reached) == (["first", "second"], True)


def test_a_child_goes_on_behind_locked_rows(other):
    turn_on()
    due_artifacts(2 * BATCH_SIZE + 50)
    other.execute("select 1 from ci_job_artifacts where id <= %s for update", (BATCH_SIZE + 50,))

    outcome = run()

    assert (outcome.destroyed, outcome.stopped, ids()) == (BATCH_SIZE, "drained", set(range(1, BATCH_SIZE + 51)))


# Must not happen: batches that slow down with what there is to do


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

    first = rows_read(START)
    reached = destroy_chunk(0, now()).reached

    assert (first, rows_read(reached)) == ([BATCH_SIZE, BATCH_SIZE], [BATCH_SIZE, BATCH_SIZE])


# How a child ends, and what becomes of its bucket


def test_a_drained_bucket_is_free_again():
    turn_on()
    due_artifacts(3)

    run()

    assert all_free()


def test_a_child_that_finds_no_bucket_does_nothing():
    turn_on()
    due_artifacts(3)
    for _ in range(BUCKETS):
        buckets.claim(client, BUCKETS)

    outcome = run()

    assert (outcome, len(ids())) == (BucketOutcome(None, 0, 0, "no_bucket"), 3)


def test_a_child_ends_at_its_deadline_and_frees_its_bucket():
    turn_on()
    due_artifacts(BATCH_SIZE + 1)

    outcome = run(clock=Clock(step=MAX_RUNTIME.total_seconds()))

    assert (outcome.destroyed, outcome.stopped, all_free()) == (BATCH_SIZE, "deadline", True)


def test_a_child_that_is_asked_to_stop_ends_after_its_batch():
    turn_on()
    due_artifacts(BATCH_SIZE + 1)
    shutdown.requested.set()
    try:
        outcome = run()
    finally:
        shutdown.requested.clear()

    assert (outcome.destroyed, outcome.stopped, all_free()) == (BATCH_SIZE, "deadline", True)


def test_a_child_ends_at_its_loop_limit_and_frees_its_bucket():
    turn_on()
    due_artifacts(LOOP_LIMIT * BATCH_SIZE + 1)

    outcome = run()

    assert (outcome.destroyed, outcome.stopped, all_free()) == (LOOP_LIMIT * BATCH_SIZE, "loop_limit", True)
    assert len(ids()) == 1


def test_a_child_whose_bucket_was_scaled_away_ends_at_its_next_safe_point():
    turn_on(high_concurrency=True)
    artifacts_of_class_5 = "update ci_job_artifacts set job_id = job_id + 5"
    due_artifacts(2 * BATCH_SIZE)
    database.execute_sql(artifacts_of_class_5)
    others = [buckets.claim(client, MANY_BUCKETS) for _ in range(5)]

    outcome = run(safe_point=turn_on)

    assert (outcome.bucket, outcome.destroyed, outcome.stopped) == (5, BATCH_SIZE, "scale_down")
    assert buckets.available(client) == []
    assert {held.token for held in buckets.held(client)} == {bucket.token for bucket in others}


def test_a_child_whose_bucket_was_flushed_away_ends_at_its_next_safe_point():
    turn_on()
    due_artifacts(2 * BATCH_SIZE)

    outcome = run(safe_point=client.flushdb)

    assert (outcome.destroyed, outcome.stopped) == (BATCH_SIZE, "bucket_lost")


def test_a_late_child_does_not_free_the_bucket_of_the_next_owner():
    turn_on()
    due_artifacts(2 * BATCH_SIZE)
    heirs = []

    def inherit():
        buckets.tidy(client, BUCKETS, silent_for=timedelta(0))
        heirs.extend(buckets.claim(client, BUCKETS) for _ in range(BUCKETS))

    outcome = run(safe_point=inherit)

    assert (outcome.destroyed, outcome.stopped) == (BATCH_SIZE, "bucket_lost")
    assert {held.token for held in buckets.held(client)} == {heir.token for heir in heirs}


def test_an_error_of_the_server_in_the_middle_rises_and_frees_the_bucket():
    turn_on()
    due_artifacts(2 * BATCH_SIZE)

    with (
        on_deletion(f"if old.id = {BATCH_SIZE + 50} then raise disk_full; end if"),
        pytest.raises(pw.OperationalError),
    ):
        run()

    assert (all_free(), len(ids()), len(outbox())) == (True, BATCH_SIZE, BATCH_SIZE)


def test_a_child_that_crashes_frees_its_bucket():
    turn_on()
    due_artifacts(2 * BATCH_SIZE)

    with pytest.raises(Crash):
        run(safe_point=crash)

    assert all_free()


def test_a_database_that_goes_down_ends_the_child_and_frees_its_bucket(other):
    turn_on()
    due_artifacts(2 * BATCH_SIZE)
    server = database.connection().info.backend_pid

    with pytest.raises(pw.OperationalError):
        run(safe_point=lambda: other.execute("select pg_terminate_backend(%s, 10000)", (server,)))

    other.execute("select count(*) from ci_job_artifacts")
    assert (other.fetchone(), all_free()) == ((BATCH_SIZE,), True)


def test_the_children_after_a_crash_end_as_if_there_had_been_none():
    mixed_artifacts(5_000)
    turn_on()
    survivors, deletable = rows(SURVIVORS), count(DELETABLE)
    for _ in range(7):
        with pytest.raises(Crash):
            run(safe_point=crash)

    for _ in range(BUCKETS):
        run()

    assert (rows(SURVIVORS), count(DELETABLE), rows(WRONG_STATISTICS)) == (survivors, 0, [])
    assert len(set(outbox())) == len(outbox()) == deletable


def test_a_child_that_finds_the_flag_off_touches_nothing():
    turn_on()
    due_artifacts(3)
    FeatureFlag.turn(FLAG, on=False)

    outcome = run()

    assert (outcome, len(ids()), all_free()) == (BucketOutcome(), 3, True)


def test_a_child_that_cannot_read_the_flag_says_so_and_touches_nothing():
    turn_on()
    due_artifacts(3)

    with without("feature_flags"), capture_logs() as lines, pytest.raises(Blocked, match="cannot be read"):
        run()

    assert (len(ids()), all_free()) == (3, True)
    assert [(line["event"], line["log_level"]) for line in lines] == [("feature flag unreadable", "error")]


# The parent


def test_the_parent_counts_the_buckets_as_it_found_them(parent):
    FeatureFlag.turn(FLAG, on=True)

    row = parent()

    assert row.result == {
        "max_buckets": 5,
        "available_count": 0,
        "occupied_count": 0,
        "stale_count": 0,
        "missing_count": 5,
        "children_enqueued": 5,
    }


def test_the_parent_starts_a_child_for_each_free_bucket(parent):
    turn_on(high_concurrency=True)
    for _ in range(3):
        buckets.claim(client, MANY_BUCKETS)

    row = parent()

    assert row.result == {
        "max_buckets": 10,
        "available_count": 7,
        "occupied_count": 3,
        "stale_count": 0,
        "missing_count": 0,
        "children_enqueued": 7,
    }
    assert depth(client, broker.namespace, "artifacts")["ready"] == 7


def test_the_parent_frees_a_bucket_whose_owner_is_silent(parent):
    turn_on()
    bucket = buckets.claim(client, BUCKETS)
    client.zadd(buckets.OCCUPIED, {str(bucket.number): time.time() - 601})

    row = parent()

    assert (row.result["stale_count"], row.result["children_enqueued"]) == (1, 5)


def test_the_parent_sends_no_child_that_is_on_its_way_already(parent):
    FeatureFlag.turn(FLAG, on=True)
    parent()

    row = parent()

    assert row.result["children_enqueued"] == 0
    assert depth(client, broker.namespace, "artifacts")["ready"] == 5


def test_the_parent_does_nothing_while_the_flag_is_off(parent):
    due_artifacts(3)

    row = parent()

    assert (row.state, row.result["skipped"], row.result["children_enqueued"]) == ("succeeded", "flag_off", 0)
    assert (client.exists(buckets.AVAILABLE), depth(client, broker.namespace, "artifacts")["ready"]) == (0, 0)


def test_the_parent_says_that_it_cannot_read_the_flag_and_does_nothing(parent):
    turn_on()

    with without("feature_flags"), capture_logs() as lines:
        row = parent()

    assert (row.state, row.reason, row.result["children_enqueued"]) == ("blocked", "flag_unreadable", 0)
    assert [line["log_level"] for line in lines if line["event"] == "feature flag unreadable"] == ["error"]


# Ten at once


def check(deletable, survivors, outcomes):
    """Each deletable one destroyed once, its object recorded once, and nothing else touched."""
    assert count(DELETABLE) == 0
    assert rows(SURVIVORS) == survivors
    assert sum(outcome.destroyed for outcome in outcomes) == len(deletable)
    assert rows(WRONG_STATISTICS) == []
    assert sorted(outbox()) == deletable


def deletable_paths():
    return sorted(path for (path,) in rows(f"select file_final_path from ci_job_artifacts where {DELETABLE}"))


def test_ten_children_destroy_each_artifact_once(say):
    mixed_artifacts(ARTIFACTS)
    turn_on(high_concurrency=True)
    deletable, survivors = deletable_paths(), rows(SURVIVORS)
    together = threading.Barrier(MANY_BUCKETS, timeout=30)

    def child():
        with database.connection_context():
            together.wait()
            return run()

    began = time.monotonic()
    with ThreadPoolExecutor(MANY_BUCKETS) as pool:
        outcomes = [each.result() for each in [pool.submit(child) for _ in range(MANY_BUCKETS)]]
    seconds = time.monotonic() - began

    say(f"ten children destroyed {len(deletable):,} of {ARTIFACTS:,} artifacts in {seconds:.1f} s")
    assert {(outcome.bucket, outcome.stopped) for outcome in outcomes} == {(n, "drained") for n in range(10)}
    check(deletable, survivors, outcomes)


def test_ten_children_destroy_each_artifact_once_while_the_flag_flips(say):
    mixed_artifacts(ARTIFACTS)
    turn_on(high_concurrency=True)
    deletable, survivors = deletable_paths(), rows(SURVIVORS)
    outcomes, ended, flips = [], threading.Event(), []

    def child():
        with database.connection_context():
            while not ended.wait(0.01) and count(DELETABLE):
                outcomes.append(run())

    def flip():
        with database.connection_context():
            while not ended.wait(FLIP_EVERY):
                flips.append(len(flips) % 2 == 1)
                turn_on(high_concurrency=flips[-1])

    began = time.monotonic()
    with ThreadPoolExecutor(MANY_BUCKETS + 1) as pool:
        flipping = pool.submit(flip)
        children = [pool.submit(child) for _ in range(MANY_BUCKETS)]
        try:
            for each in children:
                each.result(PATIENCE)
        finally:
            ended.set()
        flipping.result()
    seconds = time.monotonic() - began

    scaled_down = sum(outcome.stopped == "scale_down" for outcome in outcomes)
    say(
        f"ten children destroyed {len(deletable):,} of {ARTIFACTS:,} artifacts in {seconds:.1f} s,"
        f" with {len(flips)} flips of the flag and {scaled_down} buckets scaled away"
    )
    assert scaled_down
    check(deletable, survivors, outcomes)
