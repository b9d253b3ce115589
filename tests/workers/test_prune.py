"""Prune against real records in PostgreSQL and Redis."""

import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta

import peewee as pw
import psycopg2
import pytest
import redis
from playhouse.postgres_ext import DateTimeTZField
from structlog.testing import capture_logs

from forgekeeper import Rows
from forgekeeper.batches import BATCHES, batch, queues
from forgekeeper.connections import client
from forgekeeper.database import Base, database, now
from forgekeeper.delivery.broker import NAMESPACE
from forgekeeper.runs.blocked import Blocked
from forgekeeper.runs.deadline import Deadline
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.processes import Process
from forgekeeper.runs.quarantine import Quarantined
from forgekeeper.storage.settled import SettledUpload
from models import DeletionStatus, GitRefDeletion
from tests.harness.clocks import Crash, crash
from tests.harness.performing import perform
from workers.git_ref_cleanup import KEEP_PROCESSED
from workers.prune import CHUNK, KEEP_RUNS, MAX_RUNTIME, Outcome, prune

MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
MICROSECOND = timedelta(microseconds=1)
NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)

PROCESS_MANY = """
    insert into batched_git_ref_updates_deletions (project_id, ref, status, processed_at)
    select 1, 'refs/old/' || number, 2, now() - interval '2 days' from generate_series(1, %s) as number
"""
CLOSE_MANY = """
    insert into job_runs (batch, state, finished_at)
    select 'user_status_cleanup', 'succeeded', now() - interval '40 days' from generate_series(1, %s)
"""

pytestmark = pytest.mark.usefixtures("database")


def ref_deletion(name, status=DeletionStatus.PROCESSED, *, processed_at):
    GitRefDeletion.create(project_id=1, ref=name, status=status, processed_at=processed_at)
    return name


def closed_run(state="succeeded", *, finished_at, batch="user_status_cleanup"):
    return JobRun.create(batch=batch, state=state, finished_at=finished_at).id


def dead_letter(message_id, *, age, queue="cron"):
    """Put a message among the dead letters as Dramatiq does."""
    key = f"{NAMESPACE}:{queue}.XQ"
    client.zadd(key, {message_id: round((time.time() - age.total_seconds()) * 1000)})
    client.hset(f"{key}.msgs", message_id, b"{}")
    return message_id


def dead_letters(count, *, age, queue="cron"):
    key = f"{NAMESPACE}:{queue}.XQ"
    died = round((time.time() - age.total_seconds()) * 1000)
    client.zadd(key, {str(number): died for number in range(count)})
    client.hset(f"{key}.msgs", mapping={str(number): b"{}" for number in range(count)})


def refs():
    return {row.ref for row in GitRefDeletion.select()}


def runs():
    return {row.id for row in JobRun.select()}


def letters(queue="cron"):
    """The ids of the dead letters, which must be the same in both keys."""
    key = f"{NAMESPACE}:{queue}.XQ"
    ids, bodies = set(client.zrange(key, 0, -1)), set(client.hkeys(f"{key}.msgs"))
    assert ids == bodies
    return {name.decode() for name in ids}


def time_runs_out_after_a_chunk():
    """Tell a monotonic clock's time: it stands still until ref deletions have gone."""
    return 0.0 if len(refs()) > CHUNK else MAX_RUNTIME.total_seconds()


def run(**options):
    return perform(prune, deadline=Deadline(MAX_RUNTIME, **options))


def test_with_nothing_to_do_nothing_is_done():
    assert run() == Outcome(ref_deletions=0, runs=0, dead_letters=0, stopped="drained")


# Ref deletions


def test_a_ref_deletion_goes_a_day_after_it_was_processed():
    ref_deletion("old", processed_at=now() - DAY - MINUTE)
    young = ref_deletion("young", processed_at=now() - DAY + MINUTE)

    outcome = run()

    assert (outcome, refs()) == (Outcome(ref_deletions=1), {young})


@pytest.mark.parametrize(
    ("processed_at", "deleted"), [(NOON - MICROSECOND, 1), (NOON, 0), (NOON + MICROSECOND, 0), (None, 0)]
)
def test_a_ref_deletion_goes_only_if_it_was_processed_before_the_horizon(processed_at, deleted):
    ref_deletion("refs/heads/one", processed_at=processed_at)

    assert perform(prune, now=NOON + KEEP_PROCESSED).ref_deletions == deleted


@pytest.mark.parametrize("status", [DeletionStatus.PENDING, DeletionStatus.REJECTED])
def test_a_ref_deletion_that_was_not_processed_stays(status):
    kept = ref_deletion("refs/heads/one", status, processed_at=now() - 40 * DAY)

    run()

    assert refs() == {kept}


# Runs


def test_a_run_goes_thirty_days_after_it_was_closed():
    closed_run(finished_at=now() - 30 * DAY - MINUTE)
    young = closed_run(finished_at=now() - 30 * DAY + MINUTE)
    newest = closed_run(finished_at=now())

    outcome = run()

    assert (outcome, runs()) == (Outcome(runs=1), {young, newest})


@pytest.mark.parametrize(("finished_at", "deleted"), [(NOON - MICROSECOND, 1), (NOON, 0), (NOON + MICROSECOND, 0)])
def test_a_run_goes_only_if_it_was_closed_before_the_horizon(finished_at, deleted):
    closed_run(finished_at=finished_at)
    closed_run(finished_at=NOON + DAY)

    assert perform(prune, now=NOON + KEEP_RUNS).runs == deleted


@pytest.mark.parametrize("state", ["succeeded", "failed", "skipped", "coalesced", "missed", "blocked"])
def test_a_run_goes_however_it_was_closed(state):
    closed_run(state, finished_at=now() - 40 * DAY)
    newest = closed_run(finished_at=now())

    run()

    assert runs() == {newest}


def test_the_newest_run_of_each_batch_stays_however_old():
    for name in ("user_status_cleanup", "prune"):
        closed_run(batch=name, finished_at=now() - 50 * DAY)
    kept = {closed_run(batch=name, finished_at=now() - 40 * DAY) for name in ("user_status_cleanup", "prune")}

    outcome = run()

    assert (outcome.runs, runs()) == (2, kept)


@pytest.mark.parametrize("state", ["claimed", "enqueued", "started"])
@pytest.mark.parametrize("finished", [None, 40 * DAY])
def test_an_open_run_stays_however_old(state, finished):
    still_open = closed_run(state, finished_at=finished and now() - finished)
    newest = closed_run("skipped", finished_at=now())

    run()

    assert runs() == {still_open, newest}


# Dead letters


def test_a_dead_letter_goes_after_its_time_to_live():
    dead_letter("old", age=7 * DAY + MINUTE)
    young = dead_letter("young", age=7 * DAY - MINUTE)

    outcome = run()

    assert (outcome, letters()) == (Outcome(dead_letters=1), {young})


def test_dead_letters_of_every_queue_go():
    for queue in queues():
        dead_letter("old", age=8 * DAY, queue=queue)

    outcome = run()

    assert (outcome.dead_letters, [letters(queue) for queue in queues()]) == (len(queues()), [set()] * len(queues()))


# What batches declare


class Visit(Base):
    """A row of an operator's own batch."""

    seen_at = DateTimeTZField()


@pytest.fixture
def visits(database):
    """Declare a batch whose rows go after a day, and keep some of them."""

    @batch(cron="off", cron_sentence="", pace_sentence="", budget=DAY, time_limit=DAY, outcome=Outcome)
    def count_visits(now):
        """Count visits."""
        return []

    @count_visits.old_records
    def old_visits(now):
        return Rows(Visit, Visit.seen_at < now - DAY, since=Visit.seen_at, after=DAY)

    database.create_tables([Visit])
    Visit.insert_many([{"seen_at": now() - DAY + each * MINUTE} for each in (-2, -1, 1)]).execute()
    yield
    database.drop_tables([Visit])
    del BATCHES["count_visits"]


def left():
    return {visit.id for visit in Visit.select()}


@pytest.mark.usefixtures("visits")
def test_rows_that_a_batch_declares_go_when_they_are_old_and_are_said():
    with capture_logs() as lines:
        outcome = run()

    assert (outcome, left()) == (Outcome(), {3})
    assert lines == [{"event": "old records removed", "log_level": "info", "record": "visit", "records": 2}]


@pytest.mark.usefixtures("visits")
def test_a_row_of_a_batch_that_cannot_be_removed_stops_no_other():
    database.execute_sql("create table holding (visit bigint references visit); insert into holding values (1)")
    try:
        run()
    finally:
        database.execute_sql("drop table holding")

    assert (left(), [row.key for row in Quarantined.select()]) == ({1, 3}, ["1"])


def test_a_table_whose_old_rows_would_be_misread_blocks_the_run():
    column = "alter table batched_git_ref_updates_deletions alter project_id"
    database.execute_sql(f"{column} drop not null")
    try:
        with pytest.raises(Blocked, match="project_id may be NULL"):
            run()
    finally:
        database.execute_sql(f"{column} set not null")


# Processes


def process(pid, *, silent_for):
    """A worker that has not been heard of since it counts as silent for that long."""
    said = {"queues": ["cron"]}
    Process.enrol(kind="worker", host="forge-1", pid=pid, version="1", dead_after=-silent_for, said=said)
    return pid


def test_a_process_goes_a_day_after_it_fell_silent():
    process(1, silent_for=DAY + MINUTE)
    young, alive = process(2, silent_for=DAY - MINUTE), process(3, silent_for=-MINUTE)

    outcome = run()

    assert (outcome, {one.pid for one in Process.known()}) == (Outcome(processes=1), {young, alive})


# Uploads


def test_what_became_of_an_upload_is_known_for_thirty_days():
    for days in (29, 31):
        SettledUpload.create(location="lfs", path=f"{days}", reaped=True, settled_at=now() - days * DAY)

    outcome = run()

    assert (outcome, SettledUpload.named("lfs", ["29", "31"])) == (Outcome(uploads=1), {"29"})


# How it works through them


def test_the_result_counts_each_kind():
    for number in range(3):
        ref_deletion(str(number), processed_at=now() - 2 * DAY)
    for _ in range(3):
        closed_run(finished_at=now() - 40 * DAY)
    dead_letter("old", age=8 * DAY)

    assert run() == Outcome(ref_deletions=3, runs=2, dead_letters=1, stopped="drained")


def test_more_than_a_chunk_of_ref_deletions_goes_in_one_run():
    database.execute_sql(PROCESS_MANY, (CHUNK + 1,))

    outcome = run()

    assert (outcome, refs()) == (Outcome(ref_deletions=CHUNK + 1), set())


def test_more_than_a_chunk_of_runs_goes_in_one_run():
    database.execute_sql(CLOSE_MANY, (CHUNK + 2,))

    outcome = run()

    assert (outcome, len(runs())) == (Outcome(runs=CHUNK + 1), 1)


def test_more_than_a_chunk_of_dead_letters_goes_in_one_run():
    dead_letters(CHUNK + 1, age=8 * DAY)

    outcome = run()

    assert (outcome, letters()) == (Outcome(dead_letters=CHUNK + 1), set())


def test_a_run_ends_at_its_deadline_after_a_chunk():
    database.execute_sql(PROCESS_MANY, (CHUNK + 1,))
    closed_run(finished_at=now() - 40 * DAY)
    closed_run(finished_at=now() - 40 * DAY)

    outcome = run(clock=time_runs_out_after_a_chunk)

    assert (outcome, len(refs()), len(runs())) == (Outcome(ref_deletions=CHUNK, stopped="deadline"), 1, 2)


def test_what_the_deadline_left_goes_in_the_next_run():
    database.execute_sql(PROCESS_MANY, (CHUNK + 1,))
    run(clock=time_runs_out_after_a_chunk)

    outcome = run()

    assert (outcome, refs()) == (Outcome(ref_deletions=1), set())


@pytest.mark.parametrize("count", [7, CHUNK, CHUNK + 7])
def test_the_deadline_is_told_of_all_that_was_removed(count):
    database.execute_sql(PROCESS_MANY, (count,))
    deadline = Deadline(MAX_RUNTIME)

    perform(prune, deadline=deadline)

    assert deadline.done == count


def test_a_run_whose_time_runs_out_with_the_last_record_has_left_nothing():
    dead_letter("old", age=8 * DAY, queue=queues()[-1])

    outcome = run(clock=lambda: 0.0 if letters(queues()[-1]) else MAX_RUNTIME.total_seconds())

    assert outcome == Outcome(dead_letters=1, stopped="drained")


def test_two_runs_at_once_remove_nothing_twice():
    database.execute_sql(PROCESS_MANY, (6 * CHUNK,))
    database.execute_sql(CLOSE_MANY, (6 * CHUNK + 1,))
    dead_letters(6 * CHUNK, age=8 * DAY)
    together = threading.Barrier(2, timeout=30)

    def run_beside_another():
        meet_once = functools.cache(lambda: together.wait() * 0)
        with database.connection_context():
            return run(safe_point=meet_once)

    with ThreadPoolExecutor(2) as pool:
        outcomes = [each.result() for each in [pool.submit(run_beside_another) for _ in range(2)]]

    totals = [sum(getattr(outcome, name) for outcome in outcomes) for name in ("ref_deletions", "runs", "dead_letters")]
    assert (totals, refs(), len(runs()), letters()) == ([6 * CHUNK] * 3, set(), 1, set())


def test_the_run_after_a_crash_removes_what_was_left():
    database.execute_sql(PROCESS_MANY, (CHUNK + 1,))
    dead_letter("old", age=8 * DAY)
    with pytest.raises(Crash):
        run(safe_point=lambda: len(refs()) == 1 and crash())

    outcome = run()

    assert outcome == Outcome(ref_deletions=1, dead_letters=1)


def test_locked_rows_are_passed_over_and_go_in_the_next_run(urls):
    database.execute_sql(PROCESS_MANY, (10,))
    with closing(psycopg2.connect(urls.database)) as other, other.cursor() as cursor:
        cursor.execute("select from batched_git_ref_updates_deletions order by id limit 4 for update")
        first = run()
        other.rollback()

        second = run()

    assert (first, second, refs()) == (Outcome(ref_deletions=6), Outcome(ref_deletions=4), set())


def test_a_database_that_goes_down_ends_the_run_with_an_operational_error(urls):
    server = database.connection().info.backend_pid
    with (
        closing(psycopg2.connect(urls.database)) as other,
        other.cursor() as cursor,
        pytest.raises(pw.OperationalError),
    ):
        run(safe_point=lambda: cursor.execute("select pg_terminate_backend(%s, 10000)", (server,)))


def test_a_redis_that_is_down_costs_the_dead_letters_only(monkeypatch, tmp_path):
    ref_deletion("old", processed_at=now() - 2 * DAY)
    nowhere = redis.ConnectionPool.from_url(f"unix://{tmp_path}/nobody")
    monkeypatch.setattr(client, "connection_pool", nowhere)

    with pytest.raises(redis.ConnectionError):
        run()

    assert refs() == set()
