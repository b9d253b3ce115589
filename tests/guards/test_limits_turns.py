"""Attempts reserve one after another: an attempt that has waited for its turn reserves from the amount left by then."""

import threading
from contextlib import contextmanager

from forgekeeper.api.batches import BATCHES, CHILDREN
from forgekeeper.guards import run_guard
from forgekeeper.guards.run_guard import RunGuard
from forgekeeper.ledger.holds import Batch
from forgekeeper.ledger.limits import RunTotal
from forgekeeper.platform.database import database as db
from models import UserStatus
from tests.harness.performing import run_as_worker
from tests.harness.programs import eventually
from tests.harness.settings import settings_with
from tests.harness.tables import somebody_waits_for_a_lock, wait_for_locks

STATUSES, CHILD = BATCHES["user_status_cleanup"], CHILDREN["delete_artifact_bucket"]


@contextmanager
def keep_waiting(other, batch, work):
    """Do the *work* in a thread that waits for its turn until this block ends: the session *other* has the turn."""
    Batch.register([batch])
    other.execute("select from batches where name = %s for no key update", (batch,))

    def connect_and_work():
        with db.connection_context():
            wait_for_locks()
            work()

    thread = threading.Thread(target=connect_and_work, daemon=True)
    thread.start()
    eventually(somebody_waits_for_a_lock)
    yield
    other.connection.commit()
    thread.join(60)
    assert not thread.is_alive()


def test_a_run_deletes_no_more_than_others_have_left_of_the_limit_when_its_turn_comes(database, other):
    database.execute_sql(
        "insert into user_statuses (user_id, clear_status_at) select n, now() from generate_series(1, 90) n"
    )
    limited = settings_with(max_per_day_user_status_cleanup=80)

    with keep_waiting(other, STATUSES.name, lambda: run_as_worker(STATUSES, limited)):
        other.execute(
            "insert into run_totals (batch, run, day, records, bytes, reserved, reserved_bytes)"
            " values (%s, 0, (now() at time zone 'UTC')::date, 0, 0, 50, 0)",
            (STATUSES.name,),
        )

    assert UserStatus.select().count() == 90 - 30


def test_a_child_counts_to_the_release_that_has_begun_when_its_turn_comes(database, other, monkeypatch):
    monkeypatch.setattr(run_guard, "GUARD_INTERVAL_SECONDS", 60.0)  # or a busy machine asks once more by itself
    batch, earlier, newest = CHILD.batch.name, 1, 2
    database.execute_sql(
        "insert into job_runs (id, batch, state, started_at) values (1, %s, 'succeeded', now())", (batch,)
    )
    child = RunGuard(CHILD, settings_with(max_per_run_expired_job_artifacts=1_000), CHILD.outcome(), earlier)
    child.find_stop_reason(now=True)

    with keep_waiting(other, batch, lambda: child.reserve(100)):
        other.execute("insert into job_runs (id, batch, state, started_at) values (2, %s, 'started', now())", (batch,))
        release = "update batches set released_at = now(), released_run = 2, released_expect = 30 where name = %s"
        other.execute(release, (batch,))

    assert [(total.run, total.reserved) for total in RunTotal.select()] == [(newest, 30)]
