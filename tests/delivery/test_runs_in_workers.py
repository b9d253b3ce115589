"""Runs in real worker processes, and what becomes of them when a process, a server or a statement fails."""

import os
import signal
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest

from forgekeeper.api.batches import BATCHES
from forgekeeper.delivery.broker import broker
from forgekeeper.delivery.messages import TOKEN_OPTION, build_run_message, enqueue_run
from forgekeeper.delivery.queues import count_messages
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.reconcile import reconcile_batch
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database, now
from tests.harness.many_rows import statuses as due_statuses
from tests.harness.programs import LIMIT, Program, eventually
from tests.harness.tables import somebody_waits_for_a_lock
from tests.harness.thorough import whole_only

ROOT = Path(__file__).parents[2]
NAME = "user_status_cleanup"
BATCH = BATCHES[NAME]
DEAD_AFTER = timedelta(seconds=5)
"""Long enough that a busy machine is not taken for a dead worker."""
PATIENT = {"database_lock_timeout": 60, "database_statement_timeout": 60}
"""Settings that let a run wait for a lock for as long as a test wants it held."""
SHORT_OF_MEMORY = str(ROOT / "tests" / "harness" / "worker_short_of_memory.py")
NOTHING = {"ready": 0, "in_flight": 0, "delayed": 0}


class WorkerProcesses(Program):
    """A worker with one process; what nobody has killed must be able to end by itself."""

    def clean_up(self):
        killed = self.process.poll() is not None
        try:
            assert killed or self.end() == 0, self.text()
        finally:
            self.kill()


@pytest.fixture
def start_worker(database, tmp_path):
    started = []

    def start(*, threads=2, program=("-m", "forgekeeper.process"), **settings):
        log = tmp_path / f"worker-{len(started)}.log"
        usual = {"dead_after": DEAD_AFTER.total_seconds(), "retry_after": 0.2, "worker_threads": threads}
        words = (*program, "--processes", 1, "--threads", threads)
        started.append(WorkerProcesses(log, *words, **(usual | settings)))
        return started[-1]

    yield start
    for worker in started:
        worker.clean_up()


@pytest.fixture
def reconcile(settings):
    """Do what a scheduler does for the batch, which has no timetable here: its runs are the test's."""
    quick = settings.model_copy(update={"cron_user_status_cleanup": None, "dead_after": DEAD_AFTER})
    return lambda: reconcile_batch(BATCH.name, quick, enqueue_run, by="test")


def statuses_left():
    return database.execute_sql("select count(*) from user_statuses").fetchone()[0]


def row(run_id):
    return JobRun.get_by_id(run_id)


def in_state(run_id, state):
    return lambda: row(run_id).state == state


def send(reconcile):
    """Send a run by hand; return its row's id."""
    run_id = JobRun.claim_manual(NAME, by="test")
    reconcile()
    return run_id


def finished(reconcile, run_id):
    """Whether the run has succeeded after another look of the scheduler."""

    def looked():
        reconcile()
        return row(run_id).state == "succeeded"

    return looked


def queue():
    return count_messages(client, BATCH.queue)


def acknowledged():
    return queue() == NOTHING


@contextmanager
def without_the_table():
    database.execute_sql("alter table quarantine rename to away")
    try:
        yield
    finally:
        database.execute_sql("alter table away rename to quarantine")


def take(run_id):
    """Take the run as if it had been found dead and begun elsewhere; return what its row is then."""
    JobRun.update(attempt=2, attempt_token=uuid4(), started_by="elsewhere:1").where(JobRun.id == run_id).execute()
    return row(run_id).__data__


def process_of(run_id):
    """The process that made the run's last attempt."""
    _host, _, pid = row(run_id).started_by.rpartition(":")
    return int(pid)


# A run that goes well


def test_a_run_succeeds_with_its_result_and_its_lines_carry_its_facts(start_worker, reconcile):
    due_statuses(250)
    tick = now()
    run_id = JobRun.claim(NAME, tick, by="test", reason=None)
    worker = start_worker()

    reconcile()

    eventually(in_state(run_id, "succeeded"))
    result = {"deleted": 250, "batches": 3, "stopped": "drained"}
    assert row(run_id).result == result
    assert (row(run_id).attempt, row(run_id).failures, statuses_left()) == (1, 0, 0)
    eventually(lambda: worker.said("run finished"))
    (started,), (finished,) = worker.said("run started"), worker.said("run finished")
    facts = {"batch": NAME, "tick": tick.isoformat(), "run": run_id, "attempt": 1, "message_id": str(run_id)}
    facts["worker"] = row(run_id).started_by
    assert facts.items() <= started.items()
    assert (facts | {"level": "info"} | result).items() <= finished.items()


# A run that fails


@whole_only
def test_a_failed_run_waits_with_its_error_and_succeeds_once_its_table_is_back(start_worker, reconcile):
    due_statuses(1)
    worker = start_worker()
    with without_the_table():
        run_id = send(reconcile)
        eventually(lambda: row(run_id).failures == 1 and worker.said("run failed"))
        waiting = row(run_id)
    assert (waiting.state, waiting.reason, waiting.attempt) == ("enqueued", "error", 1)
    assert waiting.error == 'ProgrammingError: relation "quarantine" does not exist'
    (line,) = worker.said("run failed")
    assert (line["level"], line["run"], line["state"]) == ("error", run_id, "enqueued")

    eventually(finished(reconcile, run_id))

    assert (row(run_id).error, row(run_id).result["deleted"], statuses_left()) == (None, 1, 0)


# A run that loses its worker


def test_a_run_whose_process_was_killed_is_finished_by_another_worker(start_worker, reconcile, other):
    due_statuses(250)
    first = start_worker(**PATIENT)
    other.execute("lock table user_statuses in access exclusive mode")
    run_id = send(reconcile)
    eventually(lambda: somebody_waits_for_a_lock() and first.said("Worker process is ready for action."))
    killed = process_of(run_id)

    os.kill(killed, signal.SIGKILL)

    first.process.wait(LIMIT)
    assert row(run_id).state == "started"
    silent_since = row(run_id).alive_at

    def reopened():
        reconcile()
        return row(run_id).losses == 1

    eventually(reopened)
    lost = row(run_id)
    assert (lost.state, lost.reason, lost.failures) == ("enqueued", "worker_lost", 1)
    assert lost.alive_at == silent_since
    assert now() - silent_since > DEAD_AFTER

    other.connection.rollback()
    start_worker()
    eventually(finished(reconcile, run_id))
    assert (row(run_id).attempt, row(run_id).losses, statuses_left()) == (2, 1, 0)
    assert process_of(run_id) != killed


@whole_only
def test_a_process_whose_heartbeat_has_ended_ends_with_its_run(start_worker, reconcile):
    due_statuses(700)
    # So that its run is not lost before the heartbeat has failed three times.
    worker = start_worker(program=(SHORT_OF_MEMORY, "beat", "1000000"), dead_after=12, pace_user_status_cleanup=1)
    run_id = send(reconcile)

    worker.process.wait(LIMIT)

    assert [line["reason"] for line in worker.said("process ends itself")] == ["the thread 'heartbeat' ended"]
    assert (row(run_id).state, row(run_id).losses) == ("succeeded", 0)


@whole_only
def test_a_process_that_cannot_start_whole_does_not_start(start_worker, reconcile):
    worker = start_worker(program=(SHORT_OF_MEMORY, "start", "1"))
    run_id = send(reconcile)

    status = worker.process.wait(LIMIT)

    assert (status, row(run_id).state, queue()["ready"]) == (1, "enqueued", 1)
    assert [line["reason"] for line in worker.said("process ends itself")] == ["the worker cannot start"]


@whole_only
def test_a_run_that_is_not_silent_for_long_enough_is_not_taken(start_worker, reconcile):
    due_statuses(700)
    # Seven batches of two seconds each: more than twice as long as a silent run is left alone.
    start_worker(pace_user_status_cleanup=50)
    run_id = send(reconcile)

    eventually(finished(reconcile, run_id))

    run = row(run_id)
    assert run.finished_at - run.started_at > 2 * DEAD_AFTER
    assert (run.attempt, run.losses, run.failures) == (1, 0, 0)


@whole_only
def test_a_run_that_is_lost_ends_at_its_next_safe_point_and_changes_nothing(start_worker, reconcile):
    due_statuses(10_000)
    worker = start_worker(pace_user_status_cleanup=50)
    run_id = send(reconcile)
    eventually(lambda: statuses_left() < 10_000)
    lost = take(run_id)

    eventually(lambda: worker.said("run lost"))

    (line,) = worker.said("run lost")
    assert (line["level"], line["run"], line["attempt"]) == ("warning", run_id, 1)
    assert row(run_id).__data__ == lost
    assert statuses_left() > 9_000


@whole_only
def test_a_message_of_a_lost_time_starts_no_run_and_keeps_none_of_its_number_from_being_sent(start_worker, reconcile):
    due_statuses(1)
    run_id = JobRun.claim_manual(NAME, by="test")
    broker.enqueue(build_run_message(BATCH, row(run_id)).copy(options={TOKEN_OPTION: str(uuid4())}))
    worker = start_worker()

    eventually(finished(reconcile, run_id))
    eventually(lambda: worker.said("run skipped"))

    assert (worker.said("run skipped")[0]["reason"], row(run_id).attempt) == ("duplicate", 1)


@whole_only
def test_a_run_that_comes_back_to_a_process_still_at_it_is_kept_alive_and_closed_by_its_second_attempt(
    start_worker, reconcile
):
    due_statuses(200)
    worker = start_worker(pace_user_status_cleanup=10)
    run_id = send(reconcile)
    eventually(lambda: statuses_left() == 100)

    # Found dead by the ledger while Redis forgets the message: the next one meets the first attempt in the pause
    # between two chunks, and is at work for longer than it may be silent.
    JobRun.update(state="enqueued", enqueued_at=None).where(JobRun.id == run_id).execute()
    client.flushdb()
    reconcile()

    eventually(finished(reconcile, run_id))
    (line,) = worker.said("run lost")
    assert (line["attempt"], row(run_id).attempt, row(run_id).losses, statuses_left()) == (1, 2, 0, 0)


# A worker that is asked to end


def test_a_run_ends_at_its_next_safe_point_when_its_worker_is_asked_to_end(start_worker, reconcile):
    due_statuses(10_000)
    worker = start_worker(pace_user_status_cleanup=1)
    run_id = send(reconcile)
    eventually(lambda: statuses_left() < 10_000)

    status = worker.end()

    assert (status, row(run_id).state) == (0, "succeeded")
    assert row(run_id).result == {"deleted": 100, "batches": 1, "stopped": "deadline"}
    assert (statuses_left(), queue()) == (9_900, NOTHING)


@whole_only
def test_a_killed_master_takes_its_children_with_it(start_worker, reconcile):
    due_statuses(10_000)
    worker = start_worker(pace_user_status_cleanup=1)
    run_id = send(reconcile)
    eventually(lambda: statuses_left() < 10_000 and worker.said("Worker process is ready for action."))
    child = process_of(run_id)

    worker.process.kill()

    eventually(lambda: not Path(f"/proc/{child}").exists())
    assert (row(run_id).state, statuses_left()) == ("succeeded", 9_900)
