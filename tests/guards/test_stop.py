"""A stop, and a cancelled run: each run and child ends before its next chunk, and what had not begun does not.

A trigger stops the batch in the transaction of its first chunk: whoever asks before the next one hears of it.
"""

import threading
import time
from datetime import timedelta

import pytest

from forgekeeper.guards import breaker, preconditions, run_guard
from forgekeeper.guards.deadline import Deadline
from forgekeeper.ledger.holds import Hold
from forgekeeper.platform import shutdown
from forgekeeper.platform.database import database
from forgekeeper.platform.database.sessions import write_transaction
from models import UserStatus
from tests.harness.artifacts import turn_on
from tests.harness.many_rows import statuses
from tests.harness.performing import attempt_at, run_attempt, run_child, runner_of
from tests.harness.settings import settings_with
from tests.harness.tables import before_each
from tests.harness.waiting import wait_until
from workers.expired_job_artifacts import BATCH_SIZE, delete_artifact_bucket
from workers.user_status_cleanup import user_status_cleanup

CHUNK = 100
HOUR = timedelta(hours=1)
SOON = 5.0
"""Seconds in which a stop has to work."""
# Of two classes of one bucket: the second is begun when the first has been emptied.
ADD_ARTIFACTS = """
    insert into ci_job_artifacts (project_id, job_id, file_type, file_final_path, size, expire_at, locked)
    select 10, 10 * id + {number}, 1, 'due/' || {number} || '/' || id, 1, now() - interval '30 days', 0
    from generate_series(1, {count}) as id
"""
STOP = """
    if not exists (select from holds where kind = 'stop') then
        insert into holds (batch, kind, reason, by) values ('expired_job_artifacts', 'stop', 'test', 'test');
    end if
"""

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture(autouse=True)
def _asked_before_each_chunk(monkeypatch):
    monkeypatch.setattr(run_guard, "GUARD_INTERVAL_SECONDS", 0.0)


def attempted(**settings):
    """Attempt a run, from its beginning to its end; return the attempt."""
    with runner_of(settings_with(**settings)) as runner:
        return run_attempt(attempt_at(runner, user_status_cleanup))


# Under way


def test_a_child_that_is_stopped_ends_before_its_next_chunk_and_has_no_successor():
    turn_on()
    for number in range(10):
        database.execute_sql(ADD_ARTIFACTS.format(number=number, count=2 * BATCH_SIZE))

    with before_each("delete", "ci_job_artifacts", STOP), runner_of(settings_with()) as runner:
        attempt = run_child(runner, delete_artifact_bucket, "child:1")

    assert (attempt.run.outcome.destroyed, attempt.run.outcome.stopped) == (BATCH_SIZE, "deadline")
    assert attempt.result_fields()["stopped"] == "stopped"
    assert not attempt.wants_successor


def test_a_run_that_waits_for_its_pace_ends_when_it_is_stopped(monkeypatch):
    monkeypatch.setattr(run_guard, "GUARD_INTERVAL_SECONDS", 1.0)
    statuses(2 * CHUNK)
    took = []

    def work():
        with database.connection_context():
            attempted(pace_user_status_cleanup=1)
            took.append(time.monotonic())

    thread = threading.Thread(target=work)
    thread.start()
    assert wait_until(lambda: UserStatus.select().count() == CHUNK, 20)
    Hold.add(user_status_cleanup.name, "stop", reason="test", by="test")
    since = time.monotonic()
    thread.join(30)

    assert took
    assert took[0] - since < SOON
    assert UserStatus.select().count() == CHUNK


# Not begun


@pytest.mark.parametrize(
    ("where", "name"),
    [(preconditions, "require_met"), (breaker, "check_run"), (run_guard.RunGuard, "count_allowed")],
    ids=["1", "2", "3"],
)
def test_a_run_that_is_stopped_during_its_checks_or_before_its_first_chunk_deletes_nothing(monkeypatch, where, name):
    monkeypatch.setattr(run_guard, "GUARD_INTERVAL_SECONDS", 1_000.0)
    statuses(1)
    check = getattr(where, name)

    def stopped_meanwhile(*given, **facts):
        with write_transaction():
            Hold.add(user_status_cleanup.name, "stop", reason="test", by="test")
        return check(*given, **facts)

    monkeypatch.setattr(where, name, stopped_meanwhile)
    attempt = attempted()

    assert ("stopped" in attempt.result_fields().values(), UserStatus.select().count()) == (True, 1)


# How long a pace may wait


def elapsed(act):
    began = time.monotonic()
    act()
    return time.monotonic() - began


def test_pace_waits_as_long_as_the_rows_may_take_but_not_beyond_the_budget():
    assert 0.05 <= elapsed(lambda: Deadline(HOUR, pace=100).has_passed(5)) < SOON
    assert elapsed(lambda: Deadline(timedelta(seconds=0.05), pace=100).has_passed(1_000)) < SOON


def test_a_request_to_stop_ends_the_wait_for_the_pace():
    stopper = threading.Thread(target=shutdown.requested.set)
    deadline = Deadline(HOUR, pace=100, on_progress=stopper.start)
    try:
        waited = elapsed(lambda: deadline.has_passed(1_000))
        stopper.join()
    finally:
        shutdown.requested.clear()

    assert waited < SOON
