"""The outbox of batch 11 against real stores: what is deleted, what stays, what comes back."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier

import pytest
from structlog.testing import capture_logs

from forgekeeper.api.answers import ask_for_answers
from forgekeeper.guards.deadline import Deadline
from forgekeeper.guards.preconditions import Blocked
from forgekeeper.platform.database import database, now
from forgekeeper.platform.database.queries import KeyPage
from forgekeeper.sources.outbox import DeletedObject
from forgekeeper.sources.queue import QueueTable
from forgekeeper.targets import sentinel
from forgekeeper.targets.outcomes import OUTSIDE_PREFIXES_REASON, StoreUnavailable
from models import JobArtifact
from tests.harness.clocks import StandingClock
from tests.harness.installation import INSTALLATION
from tests.harness.performing import perform
from tests.harness.settings import settings_with
from tests.harness.stale_uploads import number_paths
from tests.harness.stores import Folder
from tests.harness.tables import somebody_waits_for_a_lock, wait_for_locks
from tests.harness.waiting import wait_until
from workers import delete_objects

LIMIT = 10.0
CHUNK, MAX_RUNTIME = 1_000, delete_objects.delete_objects.budget
SECOND = timedelta(seconds=1)
VISIBILITY = timedelta(minutes=10)
Outcome = delete_objects.delete_objects.outcome

pytestmark = pytest.mark.usefixtures("database")


def run(url, deadline=None, **options):
    settings = settings_with(object_stores={DeletedObject.location: url} if url else {}, **options)
    return perform(delete_objects.delete_objects, deadline=deadline, settings=settings)


def stop(url, expected, deadline=None):
    """Let a run end by an error of the *expected* kind; return what it came to."""
    outcome = Outcome()
    settings = settings_with(object_stores={DeletedObject.location: url} if url else {})
    with pytest.raises(expected):
        perform(delete_objects.delete_objects, deadline=deadline, settings=settings, outcome=outcome)
    return outcome


def record(*paths, age=SECOND, attempts=0):
    """Put objects into the outbox, due since *age*."""
    rows = []
    for path in paths:
        store_dir, _, file = path.rpartition("/")
        row = {"project_id": 1, "store_dir": store_dir, "file": file, "attempts": attempts, "pick_up_at": now() - age}
        rows.append(row)
    DeletedObject.insert_many(rows).execute()


def deleted_artifact(store, *paths, **options):
    """Leave objects behind whose artifacts are gone."""
    store.put(*paths)
    record(*paths, **options)


# Where objects may be deleted


def test_outside_the_folders_an_object_of_the_outbox_stays_and_its_row_waits(store):
    deleted_artifact(store, "@final/a", "@final2/a", "b")

    with capture_logs() as logs:
        outcome = run(store.url, object_prefixes={DeletedObject.location: ("@final",)})

    assert (outcome.deleted, outcome.failed, store.keys()) == (1, 2, {"@final2/a", "b"})
    assert [(line["objects"], line["reason"]) for line in logs] == [(2, OUTSIDE_PREFIXES_REASON)]


def outbox():
    return {row.path: row.attempts for row in DeletedObject.select()}


# What it deletes


def test_what_is_due_is_deleted_with_its_row(store):
    deleted_artifact(store, "a/b/c", "d")
    store.put("bystander")

    outcome = run(store.url)

    assert (outcome, store.keys(), outbox()) == (Outcome(2, 0, 0, 0, "drained"), {"bystander"}, {})


# Which store


@pytest.fixture
def two(folder, tmp_path):
    """A store for each location, in which each has an object that is due under the same path and one of its own."""
    local = Folder(tmp_path / "local")
    sentinel.Store("artifacts_local", local.url).create_sentinel(INSTALLATION)
    for store, own in ((folder, "remote"), (local, "local")):
        store.put("a/both", f"a/{own}")
    database.execute_sql(
        "insert into deleted_objects (file_store, store_dir, file, pick_up_at)"
        " values (1, 'a', 'both', now()), (1, 'a', 'remote', now()), (2, 'a', 'remote', now()), (2, 'a', 'x', now())"
    )
    return folder, local


def in_both(folder, local, **options):
    urls = {"artifacts": folder and folder.url, "artifacts_local": local and local.url}
    settings = settings_with(object_stores={location: url for location, url in urls.items() if url})
    return perform(delete_objects.delete_objects, settings=settings, outcome=Outcome(), **options)


def test_an_object_goes_from_the_store_that_its_row_names(two):
    folder, local = two

    assert in_both(folder, local) == Outcome(2, 2, 0, 0, "drained")
    assert (folder.keys(), local.keys(), outbox()) == ({"a/both"}, {"a/local"}, {})


def test_where_one_store_is_not_configured_the_others_objects_go_and_the_batch_is_blocked(two):
    folder, local = two

    with pytest.raises(Blocked, match="no object store 'artifacts_local' is configured"):
        in_both(folder, None)

    assert (folder.keys(), local.keys(), outbox()) == ({"a/both"}, {"a/both", "a/local"}, {"a/both": 0, "a/remote": 0})


@pytest.mark.parametrize("away", [0, 1])
def test_where_one_store_is_away_the_others_objects_go_and_the_run_fails(two, away):
    two[away].remove_sentinel()

    with pytest.raises(StoreUnavailable):
        in_both(*two)

    left = [{"a/both", "a/remote"}, {"a/both", "a/local"}]
    went = [{"a/both"}, {"a/local"}]
    assert [store.keys() for store in two] == [left[n] if n == away else went[n] for n in (0, 1)]
    assert len(outbox()) == 2


# Artifacts that are alive


def test_an_object_that_a_live_artifact_names_is_left_alone_and_its_row_removed(store):
    deleted_artifact(store, "a/kept", "a/gone")
    JobArtifact.create(project_id=1, job_id=1, file_type=1, file_final_path="a/kept")

    with capture_logs() as logs:
        outcome = run(store.url)

    assert (outcome, store.keys(), outbox()) == (Outcome(1, 0, 0, 0, "drained", 1), {"a/kept"}, {})
    assert [line["path"] for line in logs if line["log_level"] == "error"] == ["a/kept"]


def test_an_object_that_a_live_artifact_names_by_way_of_the_other_location_stays(folder):
    folder.put("sub/a/kept")
    sub = folder.root / "sub"
    sentinel.Folder(sub).create_sentinel(INSTALLATION)
    for _ in range(2):
        DeletedObject.create(file_store=1, store_dir="a", file="kept")
    JobArtifact.create(project_id=1, job_id=1, file_type=1, file_final_path="sub/a/kept")

    perform(
        delete_objects.delete_objects,
        settings=settings_with(object_stores={"artifacts": folder.url, "artifacts_local": sub.as_uri()}),
    )

    assert ((sub / "a" / "kept").exists(), outbox()) == (True, {})


# What fails


@pytest.fixture
def queue():
    """The outbox as the batch claims from it."""
    (answer,) = ask_for_answers("delete_objects", delete_objects.delete_objects.work.args[0], now())
    return QueueTable(answer, "delete_objects")


def claim(queue, limit):
    return queue.claim(now(), KeyPage(limit), locations=["artifacts"], visibility=VISIBILITY)


@pytest.mark.parametrize(
    "settle",
    [lambda queue, claimed: queue.remove({one.id: one.path for one in claimed}),
     lambda queue, claimed: queue.put_back(claimed, now())],
)  # fmt: skip
def test_a_row_that_has_its_number_since_the_database_came_back_older_is_left_as_it_is(queue, settle):
    record("a/b")
    claimed = claim(queue, 1)
    DeletedObject.delete().execute()
    DeletedObject.insert(id=claimed[0].id, project_id=1, store_dir="a", file="other", pick_up_at=now()).execute()
    before = DeletedObject.select().dicts().get()

    settle(queue, claimed)

    assert DeletedObject.select().dicts().get() == before


def test_after_ten_attempts_an_object_is_dead(s3, queue):
    deleted_artifact(s3, "bad", attempts=9)
    s3.proxy.refuse_key("bad", "AccessDenied")

    with capture_logs() as logs:
        outcome = run(s3.url)

    assert (outcome.failed, [row.path for row in queue.select_given_up()]) == (1, ["bad"])
    assert [line["objects"] for line in logs if line["event"] == "objects given up"] == [1]


# Stores that are away


def test_a_store_without_its_sentinel_loses_nothing(store):
    deleted_artifact(store, "a", "b")
    store.remove_sentinel()

    outcome = stop(store.url, StoreUnavailable)

    assert (outcome, store.keys()) == (Outcome(0, 0, 0, 2, "store_unavailable"), {"a", "b"})
    assert outbox() == {"a": 0, "b": 0}


def test_a_disk_that_vanishes_in_the_middle_takes_no_row_with_it(folder):
    deleted_artifact(folder, *number_paths(CHUNK + 1))
    gone = folder.root.with_name("unmounted")

    outcome = stop(
        folder.url,
        StoreUnavailable,
        Deadline(MAX_RUNTIME, safe_point=lambda: folder.root.exists() and folder.root.rename(gone)),
    )

    gone.rename(folder.root)
    assert outcome == Outcome(CHUNK, 0, 0, 1, "store_unavailable")
    assert outbox() == dict.fromkeys(folder.keys(), 0)
    assert run(folder.url) == Outcome(1, 0, 0, 0, "drained")


def test_without_a_store_nothing_is_claimed():
    record("a")
    due = DeletedObject.get().pick_up_at

    outcome = stop(None, Blocked)

    assert (outcome, DeletedObject.get().pick_up_at) == (Outcome(0, 0, 0, 1, "no_store"), due)


# Claims, others and deadlines


def test_two_at_once_delete_every_object_once(folder):
    deleted_artifact(folder, *number_paths(3 * CHUNK))
    together = Barrier(2)

    def run_with_the_other():
        with database.connection_context():
            together.wait()
            # With an audit, whichever begins later would take the other for dead, and count what that has deleted.
            return run(folder.url, audit="off")

    with ThreadPoolExecutor(2) as threads:
        outcomes = [future.result() for future in [threads.submit(run_with_the_other) for _ in range(2)]]

    assert sum(outcome.deleted for outcome in outcomes) == 3 * CHUNK
    assert sum(outcome.missing + outcome.failed for outcome in outcomes) == 0
    assert (folder.keys(), outbox()) == (set(), {})


def test_objects_that_another_session_locks_for_a_moment_stay_in_the_claim(other, queue):
    record(*number_paths(3))
    claimed = claim(queue, 3)
    other.execute("select from deleted_objects where id = 2 for update")

    def lock_claimed():
        with database.connection_context():
            wait_for_locks()
            return queue.lock_still_claimed(claimed)

    with ThreadPoolExecutor(1) as pool:
        locking = pool.submit(lock_claimed)
        waited = wait_until(somebody_waits_for_a_lock, LIMIT)
        other.connection.rollback()
        still_ours = locking.result()

    assert (waited, still_ours) == (True, {1, 2, 3})


def test_at_the_deadline_a_run_says_so_and_leaves_the_rest(s3):
    record(*number_paths(CHUNK + 1))
    clock = StandingClock(MAX_RUNTIME)

    outcome = run(s3.url, Deadline(MAX_RUNTIME, clock=clock, safe_point=clock.exceed_budget))

    assert (outcome, len(outbox())) == (Outcome(CHUNK, 0, 0, 1, "deadline"), 1)
    assert run(s3.url) == Outcome(1, 0, 0, 0, "drained")


def test_an_object_that_cannot_be_deleted_costs_an_attempt_and_keeps_no_other(s3):
    deleted_artifact(s3, "a", "bad", "c")
    s3.proxy.refuse_key("bad", "AccessDenied")

    outcome = run(s3.url)

    assert (outcome, s3.keys(), outbox()) == (Outcome(2, 0, 1, 0, "drained"), {"bad"}, {"bad": 1})
