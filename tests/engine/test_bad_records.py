"""One bad record stops nobody else, whatever the batch and whatever is bad about it."""

import time
from contextlib import contextmanager
from datetime import timedelta

import peewee as pw
import pytest
from structlog.testing import capture_logs

from forgekeeper.engine import run
from forgekeeper.engine.run import TooManyBadRecords
from forgekeeper.ledger import quarantine, retry_delays
from forgekeeper.ledger.quarantine import Quarantined
from forgekeeper.ledger.retry_delays import MAX_RETRIES
from forgekeeper.platform.database import database, now
from forgekeeper.sources.outbox import DeletedObject
from forgekeeper.targets import sentinel, stores
from models import JobArtifact, ProjectStatistics, UserStatus
from tests.harness.installation import INSTALLATION
from tests.harness.many_rows import artifacts, clean_statuses, destroy_artifacts, ids, statuses
from tests.harness.performing import perform
from tests.harness.settings import settings_with
from tests.harness.thorough import whole_only
from tests.harness.waiting import scale_timeout
from workers import delete_objects
from workers.prune import prune

MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
BAD = 1
RAISE = "raise exception 'spoilt'"
pytestmark = pytest.mark.usefixtures("database")


@contextmanager
def bad(table, key="id", *, on="delete", act=RAISE, which=f"= {BAD}", at_commit=False):
    """Let a change of the bad record end in an error of the forge's."""
    row = "new" if on == "update" else "old"
    body = f"begin if old.{key} {which} then {act}; end if; return {row}; end"
    kind = f"constraint trigger spoil after {on}" if at_commit else f"trigger spoil before {on}"
    deferred = "deferrable initially deferred" if at_commit else ""
    database.execute_sql(f"create function spoil() returns trigger language plpgsql as $$ {body} $$")
    database.execute_sql(f"create {kind} on {table} {deferred} for each row execute function spoil()")
    try:
        yield
    finally:
        database.execute_sql("drop function spoil cascade")


def passed_over():
    return {(row.batch, row.record, row.key): row.failures for row in Quarantined.select()}


# It stops no other, in any batch


@pytest.mark.parametrize("at_commit", [False, True])
def test_a_status_that_cannot_be_deleted_stops_no_other(at_commit):
    statuses(250)

    with bad("user_statuses", "user_id", at_commit=at_commit), capture_logs() as lines:
        outcome = clean_statuses()

    assert (outcome.deleted, outcome.stopped, ids(UserStatus)) == (249, "drained", {BAD})
    (line,) = [line for line in lines if line["event"] == "record failed"]
    assert (line["log_level"], line["record"], line["id"]) == ("error", "user_status", BAD)
    assert "spoilt" in line["error"]


def test_an_artifact_that_cannot_be_destroyed_stops_no_other_and_the_statistics_are_exact():
    artifacts(250)

    with bad("ci_job_artifacts"):
        destroyed = destroy_artifacts()

    assert (destroyed, ids(JobArtifact), DeletedObject.select().count()) == (249, {BAD}, 249)
    assert ProjectStatistics.get_by_id(1).build_artifacts_size == 1_010


@pytest.fixture
def store(tmp_path):
    """A store of objects, as its worker is set up."""
    stores.open_object_store.cache_clear()
    sentinel.Folder(tmp_path).create_sentinel(INSTALLATION)
    yield settings_with(object_stores={DeletedObject.location: tmp_path.as_uri()})
    stores.open_object_store.cache_clear()


def outbox(count, folder):
    for number in range(1, count + 1):
        (folder / str(number)).write_text("an object")
    rows = [{"store_dir": "", "file": str(number), "pick_up_at": now() - MINUTE} for number in range(1, count + 1)]
    DeletedObject.insert_many(rows).execute()


@pytest.mark.parametrize(("on", "objects"), [("delete", 10), ("update", 9)], ids=["forgotten", "claimed"])
def test_a_row_of_the_outbox_that_cannot_be_changed_stops_no_other(store, tmp_path, on, objects):
    outbox(10, tmp_path)

    with bad("deleted_objects", on=on):
        outcome = perform(delete_objects.delete_objects, settings=store)

    assert (outcome.deleted, ids(DeletedObject)) == (9, {BAD})
    assert len([file for file in tmp_path.iterdir() if file.name.isdigit()]) == 10 - objects


# It is passed over for a growing while


def test_while_it_is_passed_over_nobody_touches_it():
    statuses(10)

    with bad("user_statuses", "user_id"):
        for _ in range(5):
            clean_statuses()

    assert passed_over() == {("user_status_cleanup", "user_status", str(BAD)): 2}


@pytest.mark.parametrize("gone", [False, True], ids=["can be deleted", "went without us"])
def test_a_bad_record_is_forgotten_once_it_can_go_or_is_gone(gone):
    statuses(10)
    with bad("user_statuses", "user_id"):
        clean_statuses()
    if gone:
        UserStatus.delete().execute()

    assert (clean_statuses().deleted, passed_over()) == (int(not gone), {})


def test_what_has_not_failed_for_a_week_is_forgotten_unless_it_waits_for_a_person():
    for key, times in (("7", 1), ("8", MAX_RETRIES + 1)):
        for _ in range(times):
            quarantine.record_failure("delete_artifact_bucket", "expired_artifact", key, "-", reason="record_failed")
    Quarantined.update(failed_at=now() - 8 * DAY).execute()

    perform(prune)

    assert [key for _, _, key in passed_over()] == ["8"]


# What is no bad record


def test_where_everything_fails_the_run_fails_and_says_so():
    statuses(1_000)

    with bad("user_statuses", "user_id", which="> 0"), pytest.raises(TooManyBadRecords, match="spoilt"):
        clean_statuses()

    assert len(passed_over()) == retry_delays.MAX_FAILED_RECORDS_IN_RUN + 1


def test_no_more_than_so_many_are_remembered(monkeypatch):
    monkeypatch.setattr(run, "MAX_FAILED_RECORDS_IN_RUN", 20)
    monkeypatch.setattr(run, "MAX_BAD_RECORDS_OF_KIND", 50)
    statuses(1_000)

    with bad("user_statuses", "user_id", which="> 0"):
        for _ in range(10):
            with pytest.raises(TooManyBadRecords):
                clean_statuses()

    assert len(passed_over()) <= 60


@contextmanager
def without_the_right_to_delete():
    database.execute_sql("create role reader; grant usage on schema public, forgekeeper to reader")
    database.execute_sql("grant all on all tables in schema public, forgekeeper to reader")
    database.execute_sql("revoke delete on user_statuses from reader; set role reader")
    try:
        yield
    finally:
        database.execute_sql("reset role; drop owned by reader; drop role reader")


def test_a_right_that_is_missing_is_no_bad_record():
    statuses(10)

    with without_the_right_to_delete(), pytest.raises(pw.ProgrammingError, match="permission denied"):
        clean_statuses()

    assert (passed_over(), len(ids(UserStatus))) == ({}, 10)


@whole_only
def test_a_table_that_somebody_has_locked_is_no_bad_record(other):
    statuses(10)
    other.execute("lock table user_statuses in share mode")

    with pytest.raises(pw.OperationalError, match="lock timeout"):
        clean_statuses()

    assert passed_over() == {}


def test_what_a_trigger_says_of_a_record_is_about_it_whatever_its_code():
    statuses(10)

    with bad("user_statuses", "user_id", act="raise insufficient_privilege using message = 'protected'"):
        outcome = clean_statuses()

    assert (outcome.deleted, ids(UserStatus)) == (9, {BAD})


# What makes a run wait


@whole_only
def test_a_status_on_which_a_locked_row_depends_stops_no_other(other):
    statuses(250)
    database.execute_sql("create table holding (user_id bigint references user_statuses)")
    database.execute_sql("insert into holding values (%s)", (BAD,))
    other.execute("select 1 from holding where user_id = %s for update", (BAD,))
    began = time.monotonic()
    try:
        outcome = clean_statuses()
        seconds = time.monotonic() - began
    finally:
        other.connection.rollback()
        database.execute_sql("drop table holding")

    assert (outcome.deleted, ids(UserStatus)) == (249, {BAD})
    # A second for the chunk, and one for the record.
    assert seconds < scale_timeout(5)


# Quarantine: how long what failed is left out, and what fan-out must not send

CHILD = ("git_ref_cleanup", "clean_project_refs")


def fail(key="1", reason="child_failed"):
    quarantine.record_failure(*CHILD, key, "RepositoryFailed: no HEAD", reason=reason, run=7)
    row = Quarantined.get(Quarantined.key == key)
    return row.next_retry_at and row.next_retry_at - row.failed_at


def waiting(*keys):
    return {key for key, waits in quarantine.find_failed_keys(*CHILD, keys).items() if waits}


def test_what_failed_once_is_tried_by_the_next_run_and_then_ever_later_until_it_waits_for_a_person():
    waits = [fail() for _ in range(MAX_RETRIES + 1)]

    assert waits[:4] == [timedelta(0), 5 * MINUTE, 10 * MINUTE, 20 * MINUTE]
    assert waits[-2:] == [DAY, None]


def test_a_child_that_took_three_workers_down_waits_from_the_first_time_on():
    assert fail(reason="worker_lost") == 10 * MINUTE
    assert waiting("1", "2") == {"1"}


def test_fan_out_leaves_out_what_waits_and_nothing_else():
    fail("once")
    for _ in range(2):
        fail("twice")
    for _ in range(MAX_RETRIES + 1):
        fail("for a person")
    for _ in range(2):
        fail("over")
    Quarantined.update(retry_at=now()).where(Quarantined.key == "over").execute()

    assert waiting("once", "twice", "for a person", "over", "another") == {"twice", "for a person"}
    assert quarantine.find_failed_keys("git_ref_cleanup", "another_child", ["twice"]) == {}


def test_what_ends_well_is_forgotten_and_begins_anew():
    for _ in range(2):
        fail()

    quarantine.forget_failures(*CHILD, ["1"])

    assert (waiting("1"), fail()) == (set(), timedelta(0))


def test_what_was_written_while_the_clock_was_ahead_does_not_wait_for_it():
    for _ in range(2):
        fail()
    Quarantined.update(retry_at=now() + 365 * DAY).execute()

    assert waiting("1") == set()


def test_a_key_that_postgresql_cannot_keep_is_kept_escaped():
    key = "a\0b\ud800"

    for _ in range(2):
        quarantine.record_failure(*CHILD, key, key, reason="child_failed")

    assert waiting(key) == {key}
