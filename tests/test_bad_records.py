"""One bad record stops nobody else, whatever the batch and whatever is bad about it."""

import time
from contextlib import contextmanager
from datetime import timedelta

import peewee as pw
import pytest
from structlog.testing import capture_logs

from forgekeeper.connections import client
from forgekeeper.database import database, now
from forgekeeper.deleting.total import TURNS
from forgekeeper.flags import FeatureFlag
from forgekeeper.runs import bad_records, quarantine, retry
from forgekeeper.runs.bad_records import TooManyBadRecords
from forgekeeper.runs.deadline import Deadline
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.previewing import preview
from forgekeeper.runs.quarantine import Quarantined
from forgekeeper.runs.retry import MAX_RETRIES
from forgekeeper.storage import sentinel, stores
from forgekeeper.storage.outbox import DeletedObject
from metrics.counting import WORKER
from models import BulkImport, GitRefDeletion, JobArtifact, Project, ProjectStatistics, UserStatus
from tests.harness.clocks import Clock
from tests.harness.git_samples import Bare, put_root
from tests.harness.installation import INSTALLATION
from tests.harness.performing import perform
from tests.harness.settings import settings_with
from workers import delete_objects, expired_job_artifacts, git_ref_cleanup
from workers.expired_job_artifacts import buckets
from workers.prune import prune
from workers.stale_imports import stale_imports
from workers.user_status_cleanup import user_status_cleanup

MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
BUDGET = timedelta(minutes=5)
BAD = 1
RAISE = "raise exception 'spoilt'"
ADD_STATUSES = """
    insert into user_statuses (user_id, clear_status_at)
    select n, now() - interval '1 day' + n * interval '1 millisecond' from generate_series(1, %s) as n
"""
ADD_ARTIFACTS = """
    insert into ci_job_artifacts (id, project_id, job_id, file_type, file_final_path, size, expire_at, locked)
    select n, 1, 10 * n - 1, 1, 'due/' || n, 10, now() - interval '1 day' + n * interval '1 millisecond', 0
    from generate_series(1, %s) as n
"""
OUT_OF_PYTHONS_REACH = ["0044-03-15 12:00:00+00 BC", "-infinity"]
every_instant = pytest.mark.parametrize("instant", OUT_OF_PYTHONS_REACH)

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


def statuses(count):
    database.execute_sql(ADD_STATUSES, (count,))


def artifacts(count, *, size=10):
    database.execute_sql(ADD_ARTIFACTS, (count,))
    ProjectStatistics.create(project_id=1, build_artifacts_size=1_000 + size * count)


def ids(model):
    return {row for (row,) in model.select(model._meta.primary_key).tuples()}


def clean_statuses(**options):
    return perform(user_status_cleanup, deadline=Deadline(BUDGET, **options))


def destroy_artifacts():
    FeatureFlag.turn(expired_job_artifacts.FLAG, on=True)
    buckets.tidy(client, 5)
    settings = settings_with(object_grace=timedelta(0))
    outcomes = [perform(expired_job_artifacts.delete_artifact_bucket, settings=settings) for _ in range(5)]
    return sum(outcome.destroyed for outcome in outcomes)


def passed_over():
    return {(row.batch, row.record, row.key): row.failures for row in Quarantined.select()}


def time_passes(duration):
    Quarantined.update(retry_at=Quarantined.retry_at - duration).execute()


def errors(batch, record, kind="database"):
    labels = {"batch": batch, "record": record, "error_kind": kind}
    return WORKER.registry.get_sample_value("forgekeeper_record_errors_total", labels) or 0


# It stops no other, in any batch


@pytest.mark.parametrize("at_commit", [False, True])
def test_a_status_that_cannot_be_deleted_stops_no_other(at_commit):
    statuses(250)

    with bad("user_statuses", "user_id", at_commit=at_commit):
        outcome = clean_statuses()

    assert (outcome.deleted, outcome.stopped, ids(UserStatus)) == (249, "drained", {BAD})


def test_several_bad_records_in_several_chunks_stop_no_other():
    statuses(500)
    several = {1, 2, 57, 100, 101, 333, 500}

    with bad("user_statuses", "user_id", which=f"in {tuple(several)}"):
        outcome = clean_statuses()

    assert (outcome.deleted, ids(UserStatus)) == (493, several)


def test_a_status_that_a_foreign_key_holds_stops_no_other():
    statuses(10)
    database.execute_sql("create table holding (user_id bigint references user_statuses)")
    database.execute_sql("insert into holding values (%s)", (BAD,))
    try:
        outcome = clean_statuses()
    finally:
        database.execute_sql("drop table holding")

    assert (outcome.deleted, ids(UserStatus)) == (9, {BAD})


def test_an_artifact_that_cannot_be_destroyed_stops_no_other_and_the_statistics_are_exact():
    artifacts(250)

    with bad("ci_job_artifacts"):
        destroyed = destroy_artifacts()

    assert (destroyed, ids(JobArtifact), DeletedObject.select().count()) == (249, {BAD}, 249)
    assert ProjectStatistics.get_by_id(1).build_artifacts_size == 1_010


def test_an_artifact_whose_object_the_outbox_refuses_stops_no_other():
    artifacts(10)
    database.execute_sql("alter table ci_deleted_objects add constraint odd check (file <> '1')")
    try:
        destroyed = destroy_artifacts()
    finally:
        database.execute_sql("alter table ci_deleted_objects drop constraint odd")

    assert (destroyed, ids(JobArtifact), DeletedObject.select().count()) == (9, {BAD}, 9)


@pytest.fixture
def store(tmp_path):
    """A store of objects, as its worker is set up."""
    stores._opened.clear()
    sentinel.Folder(tmp_path).create_sentinel(INSTALLATION)
    yield settings_with(object_stores={stores.ARTIFACTS: tmp_path.as_uri()})
    stores._opened.clear()


def outbox(count, folder):
    for number in range(1, count + 1):
        (folder / str(number)).write_text("an object")
    rows = [{"store_dir": "", "file": str(number), "pick_up_at": now() - MINUTE} for number in range(1, count + 1)]
    DeletedObject.insert_many(rows).execute()


@pytest.mark.parametrize(("on", "objects"), [("delete", 10), ("update", 9)], ids=["forgotten", "claimed"])
def test_a_row_of_the_outbox_that_cannot_be_changed_stops_no_other(store, tmp_path, on, objects):
    outbox(10, tmp_path)

    with bad("ci_deleted_objects", on=on):
        outcome = perform(delete_objects.delete_objects, settings=store)

    assert (outcome.deleted, ids(DeletedObject)) == (9, {BAD})
    assert len([file for file in tmp_path.iterdir() if file.name.isdigit()]) == 10 - objects


def test_a_ref_deletion_that_cannot_be_closed_stops_no_other(settings, tmp_path):
    repository = Bare(put_root(tmp_path / "repositories"))
    repository.packed(*(f"refs/mr/{number}" for number in range(1, 7)))
    Project.create(id=7, disk_path=repository.disk_path)
    for number in range(1, 7):
        GitRefDeletion.create(project_id=7, ref=f"refs/mr/{number}")
    settings = settings.model_copy(update={"repositories_root": tmp_path / "repositories"})

    with bad("batched_git_ref_updates_deletions", on="update"):
        outcome = perform(git_ref_cleanup.clean_project_refs, 7, settings=settings)

    assert (outcome.total_deletes, outcome.stopped) == (5, "drained")
    assert {row.id for row in GitRefDeletion.pending()} == {BAD}


def test_an_old_ref_deletion_that_cannot_be_removed_stops_no_other():
    for number in range(1, 11):
        GitRefDeletion.create(id=number, project_id=1, ref="refs/x", status=2, processed_at=now() - 2 * DAY)

    with bad("batched_git_ref_updates_deletions"):
        outcome = perform(prune)

    assert (outcome.ref_deletions, ids(GitRefDeletion)) == (9, {BAD})


def test_an_old_run_that_cannot_be_removed_stops_no_other():
    for number in range(1, 12):
        JobRun.create(id=number, batch="prune", state="succeeded", finished_at=now() - 40 * DAY)

    with bad("job_runs"):
        outcome = perform(prune)

    assert (outcome.runs, ids(JobRun)) == (9, {BAD, 11})


# It is logged, counted, and passed over for a growing while


def test_a_bad_record_is_logged_with_its_id_and_its_error():
    statuses(10)

    with bad("user_statuses", "user_id"), capture_logs() as lines:
        clean_statuses()

    (line,) = [line for line in lines if line["event"] == "record failed"]
    assert (line["log_level"], line["record"], line["id"]) == ("error", "user_status", BAD)
    assert "spoilt" in line["error"]


def test_a_bad_record_is_counted():
    statuses(10)
    before = errors("user_status_cleanup", "user_status")

    with bad("user_statuses", "user_id"):
        clean_statuses()

    assert errors("user_status_cleanup", "user_status") - before == 1


def test_a_bad_record_is_passed_over_for_a_growing_while():
    statuses(1)
    pauses = []

    with bad("user_statuses", "user_id"):
        for _ in range(12):
            clean_statuses()
            (row,) = Quarantined.select()
            pauses.append(row.retry_at - row.failed_at)
            time_passes(pauses[-1])

    assert pauses[:5] == [timedelta(0), 5 * MINUTE, 10 * MINUTE, 20 * MINUTE, 40 * MINUTE]
    assert pauses[-1] == DAY


def test_while_it_is_passed_over_nobody_touches_it():
    statuses(10)

    with bad("user_statuses", "user_id"):
        for _ in range(5):
            clean_statuses()

    assert passed_over() == {("user_status_cleanup", "user_status", str(BAD)): 2}


def test_a_bad_record_goes_once_it_can_and_is_forgotten():
    statuses(10)
    with bad("user_statuses", "user_id"):
        clean_statuses()

    outcome = clean_statuses()

    assert (outcome.deleted, passed_over()) == (1, {})


def test_a_bad_record_that_went_without_us_is_forgotten():
    statuses(10)
    with bad("user_statuses", "user_id"):
        clean_statuses()
        clean_statuses()
    database.execute_sql("delete from user_statuses")

    clean_statuses()

    assert passed_over() == {}


def test_after_twenty_five_retries_a_bad_record_waits_for_a_person():
    for _ in range(MAX_RETRIES):
        quarantine.fail("user_status_cleanup", "user_status", "7", "spoilt", reason="record_failed")
    before = Quarantined.get().again
    quarantine.fail("user_status_cleanup", "user_status", "7", "spoilt", reason="record_failed")

    assert (before is None, Quarantined.get().again) == (False, None)


def test_what_has_not_failed_for_a_week_is_forgotten_unless_it_waits_for_a_person():
    for key, times in (("7", 1), ("8", MAX_RETRIES + 1)):
        for _ in range(times):
            quarantine.fail("delete_artifact_bucket", "expired_artifact", key, "-", reason="record_failed")
    Quarantined.update(failed_at=now() - 8 * DAY).execute()

    perform(prune)

    assert [key for _, _, key in passed_over()] == ["8"]


def test_a_child_of_other_artifacts_does_not_forget_a_bad_one():
    artifacts(10)

    with bad("ci_job_artifacts"):
        for _ in range(3):
            destroy_artifacts()

    assert passed_over() == {("delete_artifact_bucket", "expired_artifact", str(BAD)): 2}


def test_a_page_without_a_bad_record_costs_no_statement_more():
    statuses(250)

    with statements() as sent:
        clean_statuses()

    assert sum('delete from "user_statuses"' in one for one in sent) == 4


@contextmanager
def statements():
    """Note each statement of ours."""
    sent, execute = [], database.obj.execute_sql

    def note(sql, *arguments, **options):
        sent.append(sql)
        return execute(sql, *arguments, **options)

    database.obj.execute_sql = note
    try:
        yield sent
    finally:
        del database.obj.execute_sql


# What is no bad record


def test_where_everything_fails_the_run_fails_and_says_so():
    statuses(1_000)

    with bad("user_statuses", "user_id", which="> 0"), pytest.raises(TooManyBadRecords, match="spoilt"):
        clean_statuses()

    assert len(passed_over()) == retry.MOST_IN_RUN + 1


def test_no_more_than_so_many_are_remembered(monkeypatch):
    monkeypatch.setattr(bad_records, "MOST_IN_RUN", 20)
    monkeypatch.setattr(bad_records, "MOST_KNOWN", 50)
    statuses(1_000)

    with bad("user_statuses", "user_id", which="> 0"):
        for _ in range(10):
            with pytest.raises(TooManyBadRecords):
                clean_statuses()

    assert len(passed_over()) <= 60


@contextmanager
def without_the_right_to_delete():
    database.execute_sql("create role reader; grant usage on schema public to reader")
    database.execute_sql("grant all on all tables in schema public to reader")
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


def test_a_table_that_somebody_has_locked_is_no_bad_record(other):
    statuses(10)
    other.execute("lock table user_statuses in share mode")

    with pytest.raises(pw.OperationalError, match="lock timeout"):
        clean_statuses()

    assert passed_over() == {}


def test_a_turn_that_does_not_come_is_no_bad_record(other):
    artifacts(10)
    other.execute("select pg_advisory_xact_lock(%s, hashint8(1))", (TURNS,))

    with pytest.raises(pw.OperationalError, match="lock timeout"):
        destroy_artifacts()

    assert passed_over() == {}


def test_what_a_trigger_says_of_a_record_is_about_it_whatever_its_code():
    statuses(10)

    with bad("user_statuses", "user_id", act="raise insufficient_privilege using message = 'protected'"):
        outcome = clean_statuses()

    assert (outcome.deleted, ids(UserStatus)) == (9, {BAD})


def test_a_disk_that_is_full_is_no_bad_record():
    statuses(10)

    with bad("user_statuses", "user_id", act="raise disk_full"), pytest.raises(pw.OperationalError):
        clean_statuses()

    assert passed_over() == {}


# What makes a run wait


def test_a_status_on_which_a_locked_row_depends_stops_no_other(other):
    statuses(250)
    database.execute_sql("create table holding (user_id bigint references user_statuses on delete cascade)")
    database.execute_sql("insert into holding select user_id from user_statuses")
    other.execute("select 1 from holding where user_id = %s for update", (BAD,))
    began = time.monotonic()
    try:
        outcome = clean_statuses()
        seconds = time.monotonic() - began
    finally:
        other.connection.rollback()
        database.execute_sql("drop table holding")

    assert (outcome.deleted, ids(UserStatus)) == (249, {BAD})
    # A second for the chunk, and one for the record: halving would wait seven times.
    assert seconds < 5


def test_a_status_whose_deletion_takes_too_long_stops_no_other():
    statuses(50)
    database.execute_sql("set statement_timeout = '500ms'")
    try:
        with bad("user_statuses", "user_id", act="perform pg_sleep(10)"):
            outcome = clean_statuses()
    finally:
        database.execute_sql("reset statement_timeout")

    assert (outcome.deleted, ids(UserStatus)) == (49, {BAD})


def test_a_run_whose_time_is_up_goes_on_no_longer_than_it_takes_to_find_what_made_it_wait(monkeypatch):
    monkeypatch.setattr(bad_records, "ALONE", 0.0)
    statuses(50)
    database.execute_sql("set statement_timeout = '500ms'")
    try:
        with bad("user_statuses", "user_id", act="perform pg_sleep(10)"):
            outcome = clean_statuses(clock=Clock(step=BUDGET.total_seconds()))
    finally:
        database.execute_sql("reset statement_timeout")

    assert (outcome.stopped, outcome.deleted, list(passed_over().values())) == ("deadline", 0, [1])


# Values that Python cannot hold


@every_instant
def test_a_status_that_was_due_before_python_s_time_goes(instant):
    rows = "insert into user_statuses (user_id, clear_status_at) select n, {} from generate_series({}, {}) as n"
    database.execute_sql(rows.format("%s", -1, 148), (instant,))
    database.execute_sql(rows.format("now()", 149, 200))

    outcome = clean_statuses()

    assert (outcome.deleted, ids(UserStatus)) == (202, set())


@every_instant
def test_artifacts_that_expired_before_python_s_time_go(instant):
    artifacts(250)
    database.execute_sql("update ci_job_artifacts set expire_at = %s where id <= 150", (instant,))

    assert (destroy_artifacts(), ids(JobArtifact)) == (250, set())


@every_instant
def test_imports_that_were_touched_before_python_s_time_are_timed_out(instant):
    for table, columns, values in (
        ("bulk_imports", "user_id", "1"),
        (
            "bulk_import_entities",
            "bulk_import_id, source_full_path, destination_name, destination_namespace",
            "1, '', '', ''",
        ),
    ):
        rows = f"select {values}, %s from generate_series(1, 150)"
        database.execute_sql(f"insert into {table} ({columns}, updated_at) {rows}", (instant,))

    outcome = perform(stale_imports)

    assert (outcome.imports, outcome.entities, outcome.stopped) == (150, 150, "drained")


@pytest.mark.parametrize("column", ["created_at", "updated_at"])
@pytest.mark.parametrize("instant", [*OUT_OF_PYTHONS_REACH, "infinity", "99999-01-01 00:00:00+00"])
def test_a_ref_deletion_with_such_a_time_is_read(instant, column):
    database.execute_sql(
        f"insert into batched_git_ref_updates_deletions (project_id, ref, status, {column}) values (1, 'x', 3, %s)",
        (instant,),
    )

    (row,) = GitRefDeletion.rejected()

    assert getattr(row, column).tzinfo is not None


@every_instant
def test_the_backlog_is_known_however_old_its_oldest_is(instant):
    artifacts(3)
    statuses(3)
    BulkImport.create(user_id=1)
    database.execute_sql("update ci_job_artifacts set expire_at = %s", (instant,))
    database.execute_sql("update user_statuses set clear_status_at = %s", (instant,))
    database.execute_sql("update bulk_imports set updated_at = %s", (instant,))
    database.execute_sql(
        "insert into ci_deleted_objects (store_dir, file, pick_up_at) values ('', 'x', %s)", (instant,)
    )

    found = [batch.due(now()) for batch in (expired_job_artifacts.expired_job_artifacts, user_status_cleanup)]
    found += [batch.due(now()) for batch in (stale_imports, delete_objects.delete_objects)]

    assert [one.records for one in found] == [3, 3, 1, 1]
    assert [one.oldest.timestamp() < 0 for one in found] == [True] * 4


# Artifacts without a final path


@pytest.fixture
def paths_may_be_missing(database):
    database.execute_sql("alter table ci_job_artifacts alter file_final_path drop not null")
    yield
    database.execute_sql("delete from ci_job_artifacts")
    database.execute_sql("alter table ci_job_artifacts alter file_final_path set not null")


NO_PATHS = pytest.mark.parametrize("path", [None, ""], ids=["null", "empty"])


def put_aside(path, file, which):
    """Take the paths of some artifacts away."""
    statement = f"update ci_job_artifacts set file_final_path = %s, file = %s where {which}"
    database.execute_sql(statement, (path, file))


@NO_PATHS
@pytest.mark.usefixtures("paths_may_be_missing")
def test_an_artifact_with_a_file_and_no_final_path_stays_and_is_tried_by_nobody(path):
    artifacts(250)
    put_aside(path, "x.zip", f"id = {BAD}")

    destroyed = destroy_artifacts()

    assert (destroyed, ids(JobArtifact), DeletedObject.select().count()) == (249, {BAD}, 249)
    assert (passed_over(), DeletedObject.select().where(DeletedObject.file == "").count()) == ({}, 0)
    assert ProjectStatistics.get_by_id(1).build_artifacts_size == 1_010


@NO_PATHS
@pytest.mark.parametrize("file", [None, ""], ids=["null", "empty"])
@pytest.mark.usefixtures("paths_may_be_missing")
def test_an_artifact_with_neither_file_nor_final_path_has_no_object_and_goes(path, file):
    artifacts(10)
    put_aside(path, file, f"id = {BAD}")

    destroyed = destroy_artifacts()

    assert (destroyed, ids(JobArtifact), DeletedObject.select().count()) == (10, set(), 9)
    assert ProjectStatistics.get_by_id(1).build_artifacts_size == 1_000


@NO_PATHS
@pytest.mark.usefixtures("paths_may_be_missing")
def test_any_number_of_artifacts_without_a_path_keeps_none_behind_them(path):
    artifacts(1_550)
    database.execute_sql("update ci_job_artifacts set job_id = 10 * id, expire_at = now() - id * interval '1 minute'")
    put_aside(path, "x.zip", "id > 50")

    destroyed = destroy_artifacts()

    assert (destroyed, len(ids(JobArtifact)), passed_over()) == (50, 1_500, {})


@pytest.mark.usefixtures("paths_may_be_missing")
def test_run_preview_backlog_and_breaker_agree_on_artifacts_without_a_path():
    artifacts(20)
    put_aside("", "x.zip", "id <= 3")
    put_aside(None, "x.zip", "id between 4 and 5")
    put_aside("", None, "id = 6")
    database.execute_sql("update ci_job_artifacts set locked = 2 where id > 18")
    batch, child = expired_job_artifacts.expired_job_artifacts, expired_job_artifacts.delete_artifact_bucket

    (shown,) = preview(batch, settings_with()).parts[-1:]

    assert (shown.records, shown.kept) == (13, {"no_path": 5, "unknown": 2})
    assert child.backlogs["expired_artifact"](now()).records == 13
    assert expired_job_artifacts.at_stake(now()).due(100) == 13
    assert destroy_artifacts() == 13
