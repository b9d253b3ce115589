"""Schedulers and workers, as processes, say in the ledger's database that they live and what they are at."""

import os
import signal
import socket
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from demo.sample_data.expired_job_artifacts import add_artifacts as artifacts
from forgekeeper.batches import BATCHES
from forgekeeper.database import database, now
from forgekeeper.declaring.flags import FeatureFlag
from forgekeeper.delivery.in_flight import LONGEST_NAME, InFlight
from forgekeeper.delivery.sending import deliver
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.processes import Process, version
from forgekeeper.runs.reconcile import reconcile
from tests.harness.programs import Program, eventually

NAME = "user_status_cleanup"
DEAD_AFTER = timedelta(seconds=3)
"""Long enough that a busy machine is not taken for a dead process."""
PATIENT = {"DATABASE_LOCK_TIMEOUT": 60, "DATABASE_STATEMENT_TIMEOUT": 60}
"""Settings that let a run wait for a lock for as long as a test wants it held."""
IDENTITY = {"kind": "worker", "host": "forge-1", "pid": 7, "version": "1"}


@pytest.fixture
def start(database, tmp_path):
    """Start `forgekeeper <arguments>`; wait until it is known."""
    started = []

    def begin(*arguments, program="forgekeeper.cli", **settings):
        usual = {"DEAD_AFTER": DEAD_AFTER.total_seconds()}
        before = {one.id for one in Process.known()}
        log = tmp_path / f"service-{len(started)}.log"
        started.append(Program(log, "-m", program, *arguments, **(usual | settings)))
        eventually(lambda: {one.id for one in Process.known()} - before)
        return started[-1]

    yield begin
    for service in started:
        service.kill()


@pytest.fixture
def start_worker(start):
    def begin(*arguments, **settings):
        usual = {"worker_threads": 2}
        return start(*arguments, "--processes", 1, "--threads", 2, program="forgekeeper.process", **(usual | settings))

    return begin


@pytest.fixture
def start_scheduler(start):
    """Start a scheduler whose timetable has nothing due."""
    off = {f"CRON_{batch.upper()}": "off" for batch in BATCHES}
    return lambda **settings: start("scheduler", **(off | settings))


@pytest.fixture
def send(settings):
    def put(batch):
        quick = settings.model_copy(update={f"cron_{batch}": None})
        run_id = JobRun.claim_manual(batch, by="test")
        reconcile(batch, quick, deliver, by="test")
        return run_id

    return put


def the_process():
    """The one process that is known, as it is now."""
    (one,) = Process.known()
    return one


def work():
    """What the one process that is known is at, without how long."""
    return [{name: value for name, value in each.items() if name != "seconds"} for each in the_process().at_work]


@contextmanager
def no_table():
    database.execute_sql("alter table processes rename to away")
    try:
        yield
    finally:
        database.execute_sql("alter table away rename to processes")


# Workers


def test_a_worker_says_who_it_is_and_which_queues_it_has(start_worker):
    began = now()
    worker = start_worker("--queues", "cron", "git")

    one = the_process()

    # The master works on nothing: what is known is the process that it has started.
    parent = int(Path(f"/proc/{one.pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert parent == worker.process.pid
    assert (one.kind, one.host, one.version) == ("worker", socket.gethostname(), version())
    assert (one.queues, one.draining, one.at_work) == (["cron", "git"], False, [])
    assert began < one.started_at <= now()


def test_a_worker_keeps_saying_that_it_lives(start_worker):
    start_worker()
    first = the_process()

    eventually(lambda: the_process().alive_at > first.alive_at)

    # Read once: between two looks it may say so again.  The clock goes on between the two columns.
    later = the_process()
    assert (later.id, round((later.silent_from - later.alive_at) / DEAD_AFTER, 3)) == (first.id, 1)


def test_a_worker_says_which_run_it_is_at_since_when(start_worker, send, other):
    start_worker(**PATIENT)
    other.execute("lock table user_statuses in access exclusive mode")

    run_id = send(NAME)

    eventually(lambda: the_process().at_work)
    one = the_process()
    assert work() == [{"what": NAME, "run": run_id, "message_id": str(run_id)}]
    began = one.alive_at - timedelta(seconds=one.at_work[0]["seconds"])
    assert abs(began - JobRun.get_by_id(run_id).started_at) < timedelta(seconds=2)

    other.connection.rollback()
    eventually(lambda: the_process().at_work == [])


def test_a_worker_says_which_child_it_is_at_and_whose(start_worker, send, other):
    artifacts(10)
    FeatureFlag.turn("bulk_delete_job_artifacts", on=True)
    start_worker(**PATIENT)
    other.execute("lock table ci_job_artifacts in access exclusive mode")

    run_id = send("expired_job_artifacts")

    eventually(lambda: "delete_artifact_bucket" in {one["what"] for one in work()})
    assert {one["run"] for one in work() if one["what"] == "delete_artifact_bucket"} == {run_id}
    other.connection.rollback()


def test_a_worker_that_drains_says_so_at_once_while_it_finishes(start_worker, send, other):
    # Its next sign of life would come after 100 seconds.
    worker = start_worker(DEAD_AFTER=300, **PATIENT)
    other.execute("lock table user_statuses in access exclusive mode")
    run_id = send(NAME)
    eventually(lambda: JobRun.get_by_id(run_id).state == "started")

    worker.process.terminate()

    eventually(lambda: the_process().draining)
    assert [one["what"] for one in work()] == [NAME]
    other.connection.rollback()


def test_a_worker_that_has_ended_in_an_orderly_way_is_not_known_any_more(start_worker):
    worker = start_worker()

    assert worker.end() == 0

    assert Process.known() == []


def test_a_worker_that_was_killed_falls_silent(start_worker):
    worker = start_worker()
    killed = the_process()

    os.killpg(worker.process.pid, signal.SIGKILL)

    eventually(lambda: the_process().is_silent(now()))
    assert the_process().id == killed.id


def test_a_worker_that_cannot_say_that_it_lives_works_on_and_says_it_later(start_worker, send):
    worker = start_worker()
    with no_table():
        eventually(lambda: worker.said("heartbeat failed"))
        run_id = send(NAME)
        eventually(lambda: JobRun.get_by_id(run_id).state == "succeeded")
    again = now()

    eventually(lambda: the_process().alive_at > again)


def test_a_worker_whose_row_is_gone_enters_itself_again_as_of_its_start(start_worker):
    start_worker()
    began = the_process().started_at

    Process.delete().execute()

    eventually(Process.known)
    assert the_process().started_at == began


# Schedulers


def test_a_scheduler_says_which_timetable_it_keeps(start_scheduler):
    start_scheduler(CRON_USER_STATUS_CLEANUP="30 4 * * *")

    one = the_process()

    assert (one.kind, one.queues) == ("scheduler", None)
    assert one.timetable == dict.fromkeys(BATCHES, "off") | {NAME: "30 4 * * *"}


# Rows


def enrol(**changes):
    return Process.enrol(dead_after=DEAD_AFTER, facts={"queues": ["cron"]}, **(IDENTITY | changes))


def test_a_process_takes_the_place_of_an_older_one_of_its_name(database):
    enrol()

    second = enrol()

    assert the_process().id == second.number


def test_of_two_living_processes_of_one_name_both_are_known(database):
    first, second = enrol(), enrol()

    # The first finds its row gone.
    assert not Process.keep_alive(first, dead_after=DEAD_AFTER, facts={})
    again = enrol(started_at=first.started_at)

    assert {one.id for one in Process.known()} == {again.number, second.number}


@pytest.mark.parametrize("changes", [{"pid": 8}, {"host": "forge-2"}, {"kind": "scheduler"}])
def test_a_process_leaves_those_of_other_names_alone(database, changes):
    first, second = enrol(), enrol(**changes)

    assert {one.id for one in Process.known()} == {first.number, second.number}


def test_a_message_s_id_is_one_that_a_row_can_keep_whoever_has_made_it_up(database):
    work = InFlight()
    work.begin("actor", "\0\udc80" + "x" * 1_000_000, run=None, sent_as="1")

    row = Process.create(
        kind="worker", host="h", pid=1, version="1", alive_at=now(), silent_from=now(), at_work=work.facts()
    )

    kept = Process.get_by_id(row.id).at_work[0]["message_id"]
    assert (kept[:12], len(kept)) == (r"\x00\udc80xx", LONGEST_NAME)
