"""Batch 100 against real stores: a folder and S3, with entries, stores and runs that fail."""

import gc
from contextlib import closing

import psycopg2
import pytest
from structlog.testing import capture_logs

from forgekeeper.guards.deadline import Deadline
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database
from forgekeeper.platform.database import now as database_now
from forgekeeper.platform.failpoints import Failpoints, Fault, arm_failpoints
from forgekeeper.sources import settled
from forgekeeper.sources.outbox import DeletedObject
from forgekeeper.sources.register.entries import UploadEntry
from forgekeeper.sources.settled import SettledUpload
from forgekeeper.targets import sentinel, stores
from forgekeeper.targets.outcomes import OUTSIDE_PREFIXES_REASON
from models import JobArtifact
from tests.harness.clocks import StandingClock
from tests.harness.installation import INSTALLATION
from tests.harness.performing import perform
from tests.harness.settings import settings_with
from tests.harness.stale_uploads import (
    BATCH,
    ELSEWHERE,
    HERE,
    SECOND,
    STALE,
    adopt,
    attempts,
    begin,
    complete,
    members,
    now,
    number_paths,
    register,
    register_members,
    registered,
    run,
    run_until_unavailable,
    time_passes,
    unreachable_url,
    uploads,
)
from tests.harness.thorough import whole_only
from workers.stale_direct_uploads import (
    ENTRIES_PER_CHUNK,
    MAX_EXEC_DURATION,
    MAX_UPLOAD_DURATION,
    StaleUploadsResult,
    producer,
)

pytestmark = pytest.mark.usefixtures("database")


# What it deletes


def test_a_stale_upload_is_deleted_with_its_entry(store):
    begin(store, "a/b")

    outcome = run(artifacts=store.url)

    assert (outcome, store.keys(), registered(), attempts()) == (StaleUploadsResult(1, 1, False, 0), set(), set(), {})


def test_an_upload_of_exactly_three_hours_is_not_stale(folder):
    while True:
        client.delete(uploads.keys.pending)
        second = now()
        begin(folder, "a", age=MAX_UPLOAD_DURATION.total_seconds())
        outcome = run(artifacts=folder.url)
        if now() == second:
            break

    assert (outcome, folder.keys()) == (StaleUploadsResult(1, 0, False, 0), {"a"})


def test_a_path_is_not_cut_at_its_second_colon(store):
    begin(store, "a:b:c")
    store.put("a", "a:b", "b:c", "c")

    outcome = run(artifacts=store.url)

    assert (outcome.total_deleted_stale_entries, store.keys()) == (1, {"a", "a:b", "b:c", "c"})


def test_each_location_deletes_in_its_own_store(store, elsewhere):
    begin(store, "a")
    begin(elsewhere, "a", location=ELSEWHERE)
    store.put("b")
    begin(elsewhere, "b", location=ELSEWHERE)

    run(artifacts=store.url, lfs=elsewhere.url)

    assert (store.keys(), elsewhere.keys()) == ({"b"}, set())


# Bad entries


@pytest.mark.parametrize(
    "member",
    [
        "no colon at all",
        "artifacts:",
        ":path",
        "artifacts:..",
        "artifacts:../../etc/passwd",
        "artifacts:a/./b",
        "artifacts:a//b",
        "artifacts:/a",
        "artifacts:a/",
        f"artifacts:{sentinel.SENTINEL_NAME}",
        f"artifacts:a/{sentinel.SENTINEL_NAME}",
        "artifacts:a\x00b",
        "artifacts:a#1",
        f"artifacts:{'a' * 2000}",
        b"artifacts:\xff",
    ],
)
def test_an_entry_that_no_object_can_bear_is_failed_at_once_and_the_rest_goes_on(store, member):
    register_members(member, age=STALE + 60)
    begin(store, "good")

    outcome = run(artifacts=store.url)

    text = member.decode(errors="surrogateescape") if isinstance(member, bytes) else member
    assert (outcome, store.keys()) == (StaleUploadsResult(2, 1, False, 1), set())
    assert (members(uploads.keys.pending), members(uploads.keys.deleting), members(uploads.keys.failed)) == (
        set(),
        set(),
        {text},
    )


def test_an_unknown_location_costs_each_of_its_entries_an_attempt_and_the_others_go_on(store):
    register("a", "b", location="unknown", age=STALE + 60)
    begin(store, "good")

    outcome = run(artifacts=store.url)

    assert (outcome, store.keys()) == (StaleUploadsResult(3, 1, False, 2), set())
    assert attempts() == {"unknown:a": 1, "unknown:b": 1}


def test_one_object_that_cannot_be_deleted_costs_an_attempt_and_keeps_no_other(s3):
    paths = number_paths(20)
    begin(s3, *paths)
    s3.proxy.refuse_key(paths[3], "AccessDenied")

    outcome = run(artifacts=s3.url)

    assert (outcome, s3.keys()) == (StaleUploadsResult(20, 19, False, 1), {paths[3]})
    assert attempts() == {f"artifacts:{paths[3]}": 1}


# Stores that are away


def test_a_store_that_is_away_costs_no_attempt_and_stops_no_other(store, elsewhere):
    begin(store, "a", "b", age=STALE + 60)
    begin(elsewhere, "c", location=ELSEWHERE)

    outcome, sentence = run_until_unavailable(artifacts=unreachable_url(store), lfs=elsewhere.url)

    assert sentence.startswith("artifacts: ")
    assert (outcome, elsewhere.keys(), attempts()) == (StaleUploadsResult(3, 1, False, 0), set(), {})
    assert (store.keys(), registered()) == ({"a", "b"}, {"artifacts:a", "artifacts:b"})


def test_the_entries_of_a_store_that_is_away_use_up_nothing_of_the_pace(folder, elsewhere):
    begin(folder, *number_paths(100), age=STALE + 60)
    begin(elsewhere, "c", location=ELSEWHERE)
    deadline = Deadline(MAX_EXEC_DURATION, pace=100)

    run_until_unavailable(deadline, artifacts=unreachable_url(folder), lfs=elsewhere.url)

    assert deadline.done == 1


def test_without_its_sentinel_a_store_loses_nothing(store):
    begin(store, "a", "b")
    store.remove_sentinel()

    with capture_logs() as logs:
        outcome, _ = run_until_unavailable(artifacts=store.url)

    assert (outcome, store.keys(), attempts()) == (StaleUploadsResult(2, 0, False, 0), {"a", "b"}, {})
    assert registered() == {"artifacts:a", "artifacts:b"}
    assert [line["event"] for line in logs] == ["object store unavailable"]
    # What is to go is remembered before it goes.
    assert SettledUpload.find_settled(HERE, ["a", "b"], reaped=True) == {"a", "b"}


# Claims and deadlines


def test_a_worker_that_was_paused_for_longer_than_its_claim_deletes_nothing(store):
    begin(store, "a")
    clock = StandingClock(MAX_EXEC_DURATION)
    deadline = Deadline(MAX_EXEC_DURATION, clock=clock, safe_point=clock.exceed_budget)
    settings = settings_with(object_stores={HERE: store.url}, upload_visibility=5 * SECOND)
    arm_failpoints(Failpoints({"stale_direct_uploads.claimed": Fault("sleep", seconds=1.1)}))
    try:
        outcome = perform(BATCH, deadline=deadline, settings=settings)
    finally:
        arm_failpoints(Failpoints())

    assert (outcome, store.keys(), attempts()) == (StaleUploadsResult(1, execution_timeout=True), {"a"}, {})


def test_at_the_deadline_a_run_says_so_and_leaves_the_rest(s3):
    register(*number_paths(ENTRIES_PER_CHUNK + 1))
    clock = StandingClock(MAX_EXEC_DURATION)
    deadline = Deadline(MAX_EXEC_DURATION, clock=clock, safe_point=clock.exceed_budget)

    assert run(deadline, artifacts=s3.url) == StaleUploadsResult(ENTRIES_PER_CHUNK + 1, ENTRIES_PER_CHUNK, True, 0)
    assert run(artifacts=s3.url) == StaleUploadsResult(1, 1, False, 0)


def test_a_run_keeps_no_more_than_two_chunks_in_memory(folder):
    register(*number_paths(4 * ENTRIES_PER_CHUNK))
    kept = []

    def count_entries():
        gc.collect()
        kept.append(sum(isinstance(one, UploadEntry) for one in gc.get_objects()))

    deadline = Deadline(MAX_EXEC_DURATION, safe_point=count_entries)

    assert run(deadline, artifacts=folder.url).total_deleted_stale_entries == 4 * ENTRIES_PER_CHUNK
    assert max(kept) <= 2 * ENTRIES_PER_CHUNK


INSERT_ARTIFACT = "insert into ci_job_artifacts (project_id, job_id, file_type, file_final_path) values (1, 1, 1, %s)"


# Artifacts that are alive


def test_an_upload_that_a_live_artifact_names_is_kept_and_forgotten(store):
    begin(store, "kept", "stale")
    JobArtifact.create(project_id=1, job_id=1, file_type=1, file_final_path="kept")

    with capture_logs() as logs:
        outcome = run(artifacts=store.url)

    assert (outcome, store.keys(), registered()) == (StaleUploadsResult(2, 1, False, 0), {"kept"}, set())
    assert [line["path"] for line in logs if line["log_level"] == "error"] == ["kept"]
    assert SettledUpload.find_settled("artifacts", ["kept", "stale"]) == {"stale"}


def test_an_upload_that_lies_in_the_outbox_is_left_to_it(store):
    begin(store, "a/kept", "stale")
    DeletedObject.create(store_dir="a", file="kept", pick_up_at=database_now() + SECOND * 3600)

    outcome = run(artifacts=store.url)

    assert (outcome, store.keys(), registered()) == (StaleUploadsResult(2, 1, False, 0), {"a/kept"}, set())


@pytest.mark.parametrize(
    ("ours", "entry"), [("", "packages:a/live"), ("/a", "packages:a/live"), ("/a/b", "packages:a/b/live")]
)
def test_an_artifact_keeps_its_object_under_every_location_that_leads_to_it(folder, ours, entry):
    place = folder.root / ours.strip("/")
    place.mkdir(parents=True, exist_ok=True)
    sentinel.Store(HERE, f"{folder.url}{ours}").create_sentinel(INSTALLATION)
    name = entry.partition(":")[2].removeprefix(ours.lstrip("/")).lstrip("/")
    folder.put(f"{ours}/{name}".lstrip("/"))
    JobArtifact.create(project_id=1, job_id=1, file_type=1, file_final_path=name)
    register_members(entry)

    run(artifacts=f"{folder.url}{ours}", packages=folder.url)

    assert (place / name).exists()
    assert registered() == set()


# Redis goes back


@pytest.fixture
def back():
    """Call it to note what is pending; call what that returns to let it be so again."""

    def note():
        then = client.dump(uploads.keys.pending)
        return lambda: client.restore(uploads.keys.pending, 0, then, replace=True)

    return note


def test_an_upload_that_was_reaped_never_completes_though_redis_goes_back(store, back):
    begin(store, "a/b")
    go_back = back()
    run(artifacts=store.url)

    go_back()

    assert (producer.exists(client, HERE, "a/b"), complete(HERE, "a/b"), uploads.count_pending(client)) == (
        False,
        False,
        1,
    )


@pytest.mark.parametrize("location", [HERE, ELSEWHERE])
def test_what_has_completed_stays_though_redis_goes_back(folder, elsewhere, back, location):
    begin(folder if location == HERE else elsewhere, "kept", location=location)
    go_back = back()
    with database.atomic():
        assert producer.complete(client, location, "kept")
        if location == HERE:
            JobArtifact.create(project_id=1, job_id=1, file_type=1, file_final_path="kept")
    go_back()

    outcome = run(artifacts=folder.url, lfs=elsewhere.url)

    assert (outcome, folder.keys() | elsewhere.keys(), registered()) == (
        StaleUploadsResult(1, 0, False, 0),
        {"kept"},
        set(),
    )


def test_what_a_producer_is_just_completing_waits_for_a_later_run(folder, urls):
    begin(folder, "late", "stale")
    with closing(psycopg2.connect(urls.database)) as connection, connection.cursor() as cursor:
        cursor.execute(
            "select pg_advisory_xact_lock(hashtextextended(%s, %s))", (f"{HERE}:late", settled.UPLOAD_LOCK_SEED)
        )
        outcome = run(artifacts=folder.url)
        # To close a connection is not to wait until the server has let go of its locks.
        connection.rollback()

    time_passes(settings_with().upload_visibility + SECOND)
    later = run(artifacts=folder.url)
    assert (outcome, attempts(), later) == (StaleUploadsResult(2, 1, False, 0), {}, StaleUploadsResult(1, 1, False, 0))


def test_a_row_that_is_committed_just_before_the_look_is_seen_whatever_the_isolation(urls):
    database.execute_sql("set session characteristics as transaction isolation level repeatable read")

    with database.atomic():
        free = SettledUpload.lock_free(HERE, ["live"])
        with closing(psycopg2.connect(urls.database)) as other, other, other.cursor() as cursor:
            cursor.execute(INSERT_ARTIFACT, ("live",))
        kept = stores.find_kept_paths(JobArtifact, HERE, free, settings_with())

    database.execute_sql("set session characteristics as transaction isolation level read committed")
    assert kept == {"live": "an artifact names it"}


# Where objects may be deleted


def test_outside_the_folders_nothing_is_deleted_and_the_entry_is_put_aside(store):
    begin(store, "up/a", "up2/a", "backup/db")

    with capture_logs() as logs:
        outcome = run(prefixes={HERE: ("up",)}, artifacts=store.url)

    assert (outcome, store.keys()) == (StaleUploadsResult(3, 1, False, 2), {"up2/a", "backup/db"})
    assert members(uploads.keys.failed) == {"artifacts:up2/a", "artifacts:backup/db"}
    assert [(line["entries"], line["reason"]) for line in logs] == [(2, OUTSIDE_PREFIXES_REASON)]


# Objects that were adopted


@whole_only
def test_of_the_adopted_those_that_were_written_since_are_kept(store):
    # A bucket knows no other time of writing than that of the server: all of its objects were written just now.
    store.put("changed")
    adopt("changed", "never/there")

    with capture_logs() as logs:
        outcome = run(artifacts=store.url)

    assert (outcome.failed_entries, store.keys(), registered()) == (0, {"changed"}, set())
    assert outcome.total_deleted_stale_entries == 1
    assert [line["path"] for line in logs if line["log_level"] == "error"] == ["changed"]
