"""The parent and the children of batch 11: how they end, and what becomes of their buckets."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta

import pytest
from structlog.testing import capture_logs

from forgekeeper.delivery.queues import count_messages
from forgekeeper.engine.previewing import preview_batch
from forgekeeper.guards import preconditions
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database, now
from tests.harness.artifacts import (
    DELETABLE,
    WRONG_STATISTICS,
    artifact,
    buckets,
    count,
    due_artifacts,
    ids,
    mixed_artifacts,
    outbox,
    rows,
    run,
    turn_on,
    without_table,
)
from tests.harness.clocks import Crash, clock, crash
from tests.harness.performing import run_as_worker, run_child_as_worker
from tests.harness.settings import settings_with
from tests.harness.thorough import examples, whole_only
from tests.harness.waiting import scale_timeout
from workers import expired_job_artifacts
from workers.expired_job_artifacts import BATCH_SIZE, MAX_RUNTIME, delete_artifact_bucket

BUCKETS, MANY_BUCKETS = 5, 10
ARTIFACTS = examples(200_000)
FLIP_EVERY = 0.2
PATIENCE = 120.0

SURVIVORS = f"""
    select count(*), bit_xor(hashtextextended(artifact::text, 1)) from ci_job_artifacts as artifact
    where not coalesce({DELETABLE}, false)
"""

COUNTS = ("max_buckets", "available_count", "occupied_count", "stale_count", "missing_count", "children_enqueued")

pytestmark = pytest.mark.usefixtures("database")


def all_free(number=BUCKETS):
    return buckets.list_available(client) == list(range(number)) and buckets.list_occupied(client) == []


@pytest.fixture
def parent(settings):
    """Run the parent as a worker does; return the row of its run."""
    return lambda: run_as_worker(expired_job_artifacts.expired_job_artifacts, settings)


# How a child ends, and what becomes of its bucket


def test_a_child_that_finds_no_bucket_does_nothing():
    turn_on()
    due_artifacts(3)
    for _ in range(BUCKETS):
        buckets.claim(client, BUCKETS)

    outcome = run()

    assert (asdict(outcome), len(ids())) == (
        {"bucket": None, "destroyed": 0, "bytes": 0, "stopped": "no_bucket"},
        3,
    )


@pytest.mark.parametrize(
    ("options", "batches", "stopped"),
    [({"clock": clock(MAX_RUNTIME.total_seconds())}, 1, "deadline"), ({}, 3, "loop_limit")],
    ids=["deadline", "loop limit"],
)
def test_a_child_ends_at_its_limit_and_frees_its_bucket(options, batches, stopped, monkeypatch):
    parent = delete_artifact_bucket.batch
    monkeypatch.setattr(parent, "buckets", replace(parent.buckets, loop_limit=3))
    turn_on()
    due_artifacts(3 * BATCH_SIZE + 1)

    outcome = run(**options)

    assert (outcome.destroyed, outcome.stopped, all_free()) == (batches * BATCH_SIZE, stopped, True)


def test_a_child_whose_bucket_was_scaled_away_ends_at_its_next_safe_point():
    turn_on(high_concurrency=True)
    artifacts_of_class_5 = "update ci_job_artifacts set job_id = job_id + 5"
    due_artifacts(2 * BATCH_SIZE)
    database.execute_sql(artifacts_of_class_5)
    others = [buckets.claim(client, MANY_BUCKETS) for _ in range(5)]

    outcome = run(safe_point=turn_on)

    assert (outcome.bucket, outcome.destroyed, outcome.stopped) == (5, BATCH_SIZE, "scale_down")
    assert buckets.list_available(client) == []
    assert {held.token for held in buckets.list_occupied(client)} == {bucket.token for bucket in others}


def test_a_late_child_does_not_free_the_bucket_of_the_next_owner():
    turn_on()
    due_artifacts(2 * BATCH_SIZE)
    heirs = []

    def inherit():
        buckets.tidy(client, BUCKETS, silent_for=timedelta(0))
        heirs.extend(buckets.claim(client, BUCKETS) for _ in range(BUCKETS))

    outcome = run(safe_point=inherit)

    assert (outcome.destroyed, outcome.stopped) == (BATCH_SIZE, "bucket_lost")
    assert {held.token for held in buckets.list_occupied(client)} == {heir.token for heir in heirs}


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


def test_a_child_whose_worker_was_killed_destroys_what_is_in_its_bucket_though_no_bucket_is_free(settings):
    turn_on()
    due_artifacts(3)
    keys = [f"delete_artifact_bucket:{number}" for number in range(BUCKETS)]
    before = [buckets.claim(client, BUCKETS, child=key) for key in keys]

    child = run_child_as_worker(expired_job_artifacts.delete_artifact_bucket, settings, message_id=keys[0])

    assert (child.outcome.bucket, child.outcome.destroyed, ids()) == (before[0].number, 3, set())
    assert [buckets.renew(client, bucket) for bucket in before] == ["bucket_lost", None, None, None, None]


def test_the_parent_starts_children_until_there_are_as_many_as_buckets(parent):
    turn_on(high_concurrency=True)

    row, later = parent(), parent()

    assert tuple(row.result[name] for name in COUNTS) == (10, 10, 0, 0, 0, 10)
    assert (later.result["children_enqueued"], count_messages(client, "artifacts")["ready"]) == (0, 10)


def test_the_parent_starts_children_that_died_with_their_buckets(parent):
    turn_on()
    for number in range(BUCKETS):
        buckets.claim(client, BUCKETS, child=f"delete_artifact_bucket:{number}")

    found = parent().result
    assert tuple(found[name] for name in COUNTS) == (5, 0, 5, 0, 0, 5)


def test_the_parent_does_nothing_while_the_flag_is_off(parent):
    due_artifacts(3)

    row = parent()

    assert (row.state, row.result["skipped"], row.result["children_enqueued"]) == ("succeeded", "flag_off", 0)
    assert (client.exists(buckets.available_key), count_messages(client, "artifacts")["ready"]) == (0, 0)


def test_the_parent_says_that_it_cannot_read_the_flag_and_does_nothing(parent):
    turn_on()

    with without_table("feature_flags"), capture_logs() as lines:
        row = parent()

    assert (row.state, row.reason, row.result["children_enqueued"]) == ("blocked", "flag_unreadable", 0)
    assert [line["log_level"] for line in lines if line["event"] == "feature flag unreadable"] == ["error"]


@whole_only
def test_ten_children_destroy_each_artifact_once_while_the_flag_flips():
    mixed_artifacts(ARTIFACTS)
    turn_on(high_concurrency=True)
    paths = f"select file_final_path from ci_job_artifacts where {DELETABLE}"
    deletable, survivors = sorted(path for (path,) in rows(paths)), rows(SURVIVORS)
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

    with ThreadPoolExecutor(MANY_BUCKETS + 1) as pool:
        flipping = pool.submit(flip)
        children = [pool.submit(child) for _ in range(MANY_BUCKETS)]
        try:
            for each in children:
                each.result(scale_timeout(PATIENCE))
        finally:
            ended.set()
        flipping.result()

    assert any(outcome.stopped == "scale_down" for outcome in outcomes)
    assert sum(outcome.destroyed for outcome in outcomes) == len(deletable)
    assert (count(DELETABLE), rows(SURVIVORS), rows(WRONG_STATISTICS)) == (0, survivors, [])
    assert sorted(outbox()) == deletable


# Whose outbox


@pytest.fixture
def outbox_of_the_forge(database):
    database.execute_sql("create table public.ci_deleted_objects (like forgekeeper.deleted_objects including all)")
    yield "select file_store, store_dir || '/' || file, project_id from public.ci_deleted_objects"
    database.execute_sql("drop table public.ci_deleted_objects")


def test_objects_that_are_the_forges_to_delete_go_into_its_outbox_alone(outbox_of_the_forge):
    turn_on()
    buckets.tidy(client, BUCKETS)
    artifact(path="a/b/c", project=7, file_store=1)

    outcome = run(objects="theirs")

    assert outcome.destroyed == 1
    assert database.execute_sql(outbox_of_the_forge).fetchall() == [(1, "a/b/c", 7)]
    assert outbox() == []


@pytest.mark.parametrize(
    ("change", "lacks"),
    [
        ("drop column project_id", "column ci_deleted_objects.project_id is missing"),
        ("rename to gone", "table ci_deleted_objects is missing"),
    ],
)
def test_an_outbox_of_the_forge_that_does_not_fit_blocks_the_batch_only_if_objects_go_there(
    outbox_of_the_forge, monkeypatch, change, lacks
):
    with database.atomic() as transaction:
        database.execute_sql(f"alter table public.ci_deleted_objects {change}")
        found = {}
        for whose in ("ours", "theirs"):
            monkeypatch.setattr(client, "settings", settings_with(objects=whose))
            unfit = preconditions.find_relation_faults(expired_job_artifacts.expired_job_artifacts)
            found[whose] = [said.split(":")[0] for said in unfit]
        transaction.rollback()

    assert found == {"ours": [], "theirs": [lacks]}


# Locks that are not known


@pytest.fixture
def jobs(database):
    """Jobs of which the forge says whether their artifacts are locked: one is unlocked, one is locked."""
    database.execute_sql("create table public.ci_job_locks (job_id bigint primary key, locked smallint)")
    database.execute_sql("insert into public.ci_job_locks values (9, 0), (10, 1)")
    yield
    database.execute_sql("drop table public.ci_job_locks")


def of_jobs():
    """Add expired artifacts of locks known and unknown; return the ids of those that only their job unlocks."""
    turn_on()
    buckets.tidy(client, BUCKETS)
    # Of project 1 an artifact of class n has the job n + 9.
    going = {artifact(locked=lock, path=f"{lock}") for lock in (2, 7)}
    artifact(number=1, locked=2)
    artifact(number=2, locked=2)
    artifact(locked=1)
    artifact(locked=2, file_type=3)
    artifact(locked=2, path="", file="of unknown place")
    artifact(locked=2, expire_at=None)
    return going


def destroyed(**options):
    before = ids()
    for _ in range(BUCKETS):
        run(**options)
    return before - ids()


@pytest.mark.usefixtures("jobs")
def test_an_artifact_of_unknown_lock_goes_by_its_jobs_if_a_setting_says_so():
    going = of_jobs()

    assert (destroyed(), destroyed(unknown_locks="resolve")) == (set(), going)


@pytest.mark.usefixtures("jobs")
def test_preview_and_backlog_count_what_goes_by_its_job(settings, monkeypatch):
    going = of_jobs()
    asked = settings_with(unknown_locks="resolve")
    monkeypatch.setattr(client, "settings", asked)

    found = preview_batch(expired_job_artifacts.expired_job_artifacts, asked, sample=10)

    assert found.due == len(going)
    assert found.parts[0].kept == {"trace": 1, "locked": 1, "unknown": 3}
    assert delete_artifact_bucket.backlogs["expired_artifact"](now()).records == len(going)


def test_without_the_forges_rule_nothing_is_resolved_and_the_batch_is_blocked(settings):
    turn_on()

    row = run_as_worker(expired_job_artifacts.expired_job_artifacts, settings_with(unknown_locks="resolve"))

    assert (row.state, row.result["skipped"]) == ("blocked", "schema")
    assert "the forge lacks the relation ci_job_locks" in row.result["blocked"]
