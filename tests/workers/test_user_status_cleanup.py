"""Batch 48 against a real PostgreSQL, with users who change their statuses meanwhile."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import timedelta

import psycopg2
import pytest

from forgekeeper.engine import statement
from forgekeeper.guards.deadline import Deadline
from forgekeeper.platform.database import database, sessions
from tests.harness.clocks import clock
from tests.harness.many_rows import statuses as due_statuses
from tests.harness.performing import perform
from tests.harness.programs import eventually
from tests.harness.tables import somebody_waits_for_a_lock, wait_for_locks
from tests.harness.thorough import whole_only
from workers import user_status_cleanup as document
from workers.user_status_cleanup import BATCH_SIZE, MAX_RUNTIME, user_status_cleanup

Outcome = user_status_cleanup.outcome

HOUR = timedelta(hours=1)
EXTENSIONS = 2_000
A_RUN = MAX_RUNTIME.total_seconds()

LOCK_OLDEST = """
    select user_id from user_statuses where clear_status_at <= now()
    order by clear_status_at, user_id limit %s for update
"""
# One that the run will come to next, or is at.
EXTEND_ANY = """
    update user_statuses set clear_status_at = now() + interval '1 day'
    where user_id = (
        select user_id from user_statuses where clear_status_at <= now()
        order by clear_status_at, user_id offset %s limit 1
    ) and clear_status_at <= now()
    returning user_id, clear_status_at
"""
NESTED_LOOPS_ONLY = "; ".join(
    f"set local enable_{node} = off" for node in ("material", "hashjoin", "mergejoin", "hashagg", "sort")
)


# In no order, and none is due.
ADD_LATER = """
    insert into user_statuses (user_id, clear_status_at)
    select id, now() + interval '1 day' + ('x' || left(md5(id::text), 7))::bit(28)::integer * interval '1 millisecond'
    from generate_series(1, %s) as id
"""
TURN_DUE = "update user_statuses set clear_status_at = clear_status_at - interval '10 days' where user_id %% 5 = 0"
ROWS_READ = "select seq_tup_read + idx_tup_fetch from pg_stat_user_tables where relid = 'user_statuses'::regclass"

pytestmark = pytest.mark.usefixtures("database")


def statuses():
    return dict(database.execute_sql("select user_id, clear_status_at from user_statuses").fetchall())


def run(**options):
    return perform(user_status_cleanup, deadline=Deadline(MAX_RUNTIME, **options))


def run_a_chunk(**options):
    """Run until the first safe point, where time is up."""
    return perform(user_status_cleanup, deadline=Deadline(MAX_RUNTIME, clock=clock(A_RUN)), **options)


@pytest.mark.parametrize(
    ("count", "batches"), [(BATCH_SIZE - 1, 1), (BATCH_SIZE, 1), (BATCH_SIZE + 1, 2), (2 * BATCH_SIZE + 1, 3)]
)
def test_a_run_takes_as_many_batches_as_it_needs(count, batches):
    due_statuses(count)

    outcome = run()

    assert (outcome, statuses()) == (Outcome(count, batches, "drained"), {})


def test_a_run_ends_at_its_deadline_after_a_full_batch():
    due_statuses(2 * BATCH_SIZE + 50)

    outcome = run(clock=clock(A_RUN))

    assert (outcome, len(statuses())) == (Outcome(BATCH_SIZE, 1, "deadline"), BATCH_SIZE + 50)


@contextmanager
def one_row_statistics_and_nested_loops(count):
    """Let PostgreSQL take a table of *count* due rows for one of a single row, and give it only one way to join."""
    due_statuses(1)
    database.execute_sql("analyze user_statuses")
    # In one transaction, so that no autovacuum can see the rows and correct the statistics.
    with database.atomic():
        due_statuses(count - 1, first=2)
        database.execute_sql(NESTED_LOOPS_ONLY)
        yield


@pytest.mark.parametrize("limit", [1, 10, BATCH_SIZE])
def test_the_claim_never_deletes_more_than_the_limit(limit, monkeypatch):
    monkeypatch.setattr(document, "BATCH_SIZE", limit)
    with one_row_statistics_and_nested_loops(110):
        deleted = run_a_chunk().deleted

    assert (deleted, len(statuses())) == (limit, 110 - limit)


@contextmanager
def session(settings):
    """Let all statements of this session be planned with these *settings*, and no autovacuum correct the statistics."""
    database.execute_sql("alter table user_statuses set (autovacuum_enabled = off)")
    database.execute_sql(settings)
    try:
        yield
    finally:
        database.execute_sql("reset all; alter table user_statuses reset (autovacuum_enabled)")


def rows_read():
    database.execute_sql("select pg_stat_force_next_flush()")
    ((rows,),) = database.execute_sql(ROWS_READ).fetchall()
    return rows


each_key = pytest.mark.parametrize(
    "key", ['"user_statuses".ctid', '"user_statuses"."user_id"'], ids=["ctid", "user_id"]
)
"""What a chunk's statement may call a row by."""


@whole_only
@each_key
@pytest.mark.parametrize(
    ("most", "plan"), [(0, "auto"), (1, "auto"), (1, "force_custom_plan"), (1, "force_generic_plan")]
)
def test_with_stale_statistics_a_run_reads_what_it_deletes_and_no_more(key, most, plan, monkeypatch):
    monkeypatch.setattr(sessions, "MAX_PREPARED_STATEMENTS", most)
    monkeypatch.setattr(statement, "write_row_locator", lambda _rows: key)
    with session(f"set plan_cache_mode = {plan}"):
        database.execute_sql(ADD_LATER, (20_000,))
        database.execute_sql("vacuum analyze user_statuses")
        database.execute_sql(TURN_DUE)
        before = rows_read()
        deleted = run().deleted
        read = rows_read() - before

    assert deleted == 4_000
    assert read < 3 * deleted


def test_statuses_extended_in_thousands_of_interleavings_all_survive(urls):
    extended, too_late, deleted, added = {}, [], 0, 0
    running, ended = threading.Event(), threading.Event()

    def extend():
        with closing(psycopg2.connect(urls.database)) as connection, connection.cursor() as cursor:
            connection.autocommit = True
            while not ended.is_set():
                running.wait(1)
                cursor.execute(EXTEND_ANY, (random.randrange(2 * BATCH_SIZE),))
                row = cursor.fetchone()
                if row is None:
                    too_late.append(1)
                else:
                    user_id, until = row
                    extended[user_id] = until

    with ThreadPoolExecutor(2) as pool:
        users = [pool.submit(extend) for _ in range(2)]
        while len(extended) < EXTENSIONS and not any(user.done() for user in users):
            due_statuses(10_000, first=added + 1)
            added += 10_000
            running.set()
            deleted += run().deleted
            running.clear()
            # Users look through the index from its beginning: what lies there dead would make them slower each time.
            database.execute_sql("vacuum user_statuses")
        ended.set()
        running.set()
        for user in users:
            user.result()
    deleted += run().deleted

    assert len(extended) >= EXTENSIONS
    assert too_late, "nobody ever came too late: the run and the users were not at the same rows"
    assert statuses() == extended
    assert deleted == added - len(extended)


@each_key
def test_a_status_that_is_extended_while_a_chunk_is_deleted_stays(key, other, monkeypatch):
    monkeypatch.setattr(statement, "write_row_locator", lambda _rows: key)
    due_statuses(3)
    other.execute("update user_statuses set clear_status_at = now() + interval '1 day' where user_id = 2")

    def run_in_a_thread():
        with database.connection_context():
            wait_for_locks()
            return run().deleted

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_in_a_thread)
        eventually(lambda: running.done() or somebody_waits_for_a_lock())
        other.connection.commit()

    assert (running.result(), statuses().keys()) == (2, {2})


@whole_only
def test_locked_rows_make_a_run_neither_wait_nor_search_again_and_again(other):
    due_statuses(4_000)
    other.execute(LOCK_OLDEST, (2_000,))
    before = rows_read()

    deleted = run().deleted

    assert deleted == 2_000
    assert rows_read() - before < 10_000
