"""Schedulers and workers, as processes, say in the ledger's database that they live and what they are at."""

import socket
from datetime import timedelta
from pathlib import Path

import pytest

from forgekeeper.api.batches import BATCHES
from forgekeeper.delivery.messages import enqueue_run
from forgekeeper.ledger.heartbeats import Process, read_version
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.reconcile import reconcile_batch
from forgekeeper.platform.database import database, now
from tests.harness.programs import Program, eventually
from tests.harness.thorough import whole_only
from tests.system.proxy import redis_through

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
        before = {one.id for one in Process.list_all()}
        log = tmp_path / f"service-{len(started)}.log"
        started.append(Program(log, "-m", program, *arguments, **(usual | settings)))
        eventually(lambda: {one.id for one in Process.list_all()} - before)
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
        reconcile_batch(batch, quick, enqueue_run, by="test")
        return run_id

    return put


def the_process():
    """The one process that is known, as it is now."""
    (one,) = Process.list_all()
    return one


def work():
    """What the one process that is known is at, without how long."""
    return [{name: value for name, value in each.items() if name != "seconds"} for each in the_process().at_work]


# Workers


@whole_only
def test_a_worker_says_who_it_is_and_which_queues_it_has_until_it_ends(start_worker):
    began = now()
    worker = start_worker("--queues", "cron", "git")

    one = the_process()

    # The master works on nothing: what is known is the process that it has started.
    parent = int(Path(f"/proc/{one.pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert parent == worker.process.pid
    assert (one.kind, one.host, one.version) == ("worker", socket.gethostname(), read_version())
    assert (one.queues, one.draining, one.at_work) == (["cron", "git"], False, [])
    assert began < one.started_at <= now()

    assert worker.end() == 0
    assert Process.list_all() == []


@whole_only
def test_a_worker_says_which_run_it_is_at_since_when(start_worker, send, other):
    start_worker(**PATIENT)
    other.execute("lock table user_statuses in access exclusive mode")

    run_id = send(NAME)

    eventually(lambda: work() == [{"what": NAME, "run": run_id, "message_id": str(run_id)}])
    one = the_process()
    began = one.alive_at - timedelta(seconds=one.at_work[0]["seconds"])
    assert abs(began - JobRun.get_by_id(run_id).started_at) < timedelta(seconds=10)

    other.connection.rollback()
    eventually(lambda: the_process().at_work == [])


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


@whole_only
def test_a_worker_that_cannot_say_that_it_lives_works_on_and_says_it_later(start_worker, send):
    worker = start_worker()
    database.execute_sql("alter table processes rename to away")
    eventually(lambda: worker.said("heartbeat failed"))
    run_id = send(NAME)
    eventually(lambda: JobRun.get_by_id(run_id).state == "succeeded")
    database.execute_sql("alter table away rename to processes")
    again = now()

    eventually(lambda: the_process().alive_at > again)


def test_a_worker_says_that_it_lives_while_redis_does_not_answer(start_worker, urls):
    proxy, through = redis_through(urls.redis)
    with proxy:
        start_worker(DEAD_AFTER=1, REDIS_URL=through, REDIS_TIMEOUT=600)
        proxy.black_hole()

        # The first may have been on its way already.
        for _ in range(2):
            again = now()
            eventually(lambda again=again: the_process().alive_at > again)


def test_a_worker_whose_row_is_gone_enters_itself_again_as_of_its_start(start_worker):
    start_worker()
    began = the_process().started_at

    Process.delete().execute()

    eventually(Process.list_all)
    assert the_process().started_at == began


# Schedulers


def test_a_scheduler_says_which_timetable_it_keeps(start_scheduler):
    start_scheduler(CRON_USER_STATUS_CLEANUP="30 4 * * *")

    one = the_process()

    assert (one.kind, one.queues) == ("scheduler", None)
    assert one.timetable == dict.fromkeys(BATCHES, "off") | {NAME: "30 4 * * *"}


# Rows


def enrol(**changes):
    return Process.record_heartbeat(None, dead_after=DEAD_AFTER, facts={"queues": ["cron"]}, **(IDENTITY | changes))


def test_a_process_takes_the_place_of_an_older_one_of_its_name_and_of_no_other(database):
    enrol()
    others = [enrol(**changes) for changes in ({"pid": 8}, {"host": "forge-2"}, {"kind": "scheduler"})]

    second = enrol()

    assert {one.id for one in Process.list_all()} == {second.id, *(other.id for other in others)}
