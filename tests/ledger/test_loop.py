"""The loops of a scheduler, and the look that wakes them: the heartbeat says if one of them gets no answer."""

import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue

import pytest
from apscheduler.schedulers.blocking import BlockingScheduler
from pydantic import SecretStr

import scheduler
from forgekeeper.api.batches import BATCHES
from forgekeeper.ledger.holds import Batch
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.reconcile import SCHEDULER_COUNTERS
from forgekeeper.platform.connections import ServerTimeouts, configure_clients
from forgekeeper.platform.database import database
from scheduler import BatchLoop, BatchWatch, _keep_heartbeat
from tests.harness.thorough import whole_only
from tests.harness.ticks import BATCH, DAWN, HOUR, LIMIT, NOON, clock_is, ledger, rows
from tests.harness.waiting import wait_until
from tests.system.proxy import postgres_through

__all__ = ["ledger"]

BROKEN_STOPPER = """
from apscheduler.schedulers.blocking import BlockingScheduler
from forgekeeper.platform.shutdown import open_request_queue
from metrics import logs
from scheduler import Stopper

logs.configure("json")
asked = open_request_queue()
stopper = Stopper(asked, BlockingScheduler())  # a clock that was never started cannot be shut down
stopper.running.set()
stopper.start()
asked.put(None)
stopper.join()
print("asked to end:", asked.get(timeout=60))
"""


@pytest.fixture
def patient(ledger):
    """Settings under which a loop turns when it is woken, and not within the test without."""
    return ledger.model_copy(update={"poll_interval": HOUR})


@pytest.fixture
def loops():
    """Make loops that are stopped in the end."""
    made = []

    def make(batch, settings):
        made.append(BatchLoop(batch, settings, broken=threading.Event(), stop_requests=SimpleQueue()))
        return made[-1]

    yield make
    for loop in made:
        loop.stop()
        if loop.ident:
            loop.join()


def test_a_loop_reconciles_when_it_is_woken(loops, patient, monkeypatch):
    turned, in_order = threading.Event(), scheduler.reconcile_batch

    def turn(*arguments, **facts):
        in_order(*arguments, **facts)
        turned.set()

    monkeypatch.setattr(scheduler, "reconcile_batch", turn)
    loop = loops(BATCH, patient)
    loop.start()
    # Its first turn is through: until then it might see noon without being woken.
    assert turned.wait(LIMIT)
    clock_is(NOON)

    loop.wake()

    assert wait_until(lambda: rows("enqueued") == {NOON}, LIMIT)


def test_a_loop_one_of_whose_turns_fails_for_any_reason_turns_again(loops, patient, monkeypatch):
    monkeypatch.setattr(scheduler, "RETRY_PAUSE_SECONDS", 0.0)
    errors, in_order = iter([MemoryError, RuntimeError]), scheduler.reconcile_batch

    def spoilt(*arguments, **facts):
        for error in errors:
            raise error
        in_order(*arguments, **facts)

    monkeypatch.setattr(scheduler, "reconcile_batch", spoilt)
    loop = loops(BATCH, patient)
    clock_is(NOON)

    loop.start()

    assert wait_until(lambda: rows("enqueued") == {NOON}, LIMIT)
    assert not loop._broken.is_set()


def test_a_loop_that_breaks_ends_the_process(loops, patient, monkeypatch):
    monkeypatch.setattr(scheduler, "RETRY_PAUSE_SECONDS", 0.0)

    def broken(*_arguments, **_facts):
        raise TypeError

    monkeypatch.setattr(scheduler, "reconcile_batch", broken)
    loop = loops(BATCH, patient)

    loop.start()
    loop.join(LIMIT)

    assert not loop._stop_requests.empty()
    assert loop._broken.is_set()


@whole_only
@pytest.mark.usefixtures("_migrated")
def test_a_scheduler_s_heartbeat_is_as_old_as_the_turn_that_gets_no_answer(urls, settings):
    proxy, url = postgres_through(urls.database)
    with proxy:
        own = settings.model_copy(update={"database_url": SecretStr(url), "scheduler_timeout": timedelta(seconds=1)})
        configure_clients(own, ServerTimeouts.for_scheduler(own), name="tests", connections=None)
        loop = BatchLoop(BATCH, own, broken=threading.Event(), stop_requests=SimpleQueue())
        clock = BlockingScheduler(timezone="UTC")
        _keep_heartbeat(clock, [loop])

        def age():
            clock.get_job("heartbeat").func()
            return time.time() - SCHEDULER_COUNTERS.registry.get_sample_value(
                "forgekeeper_scheduler_heartbeat_timestamp_seconds"
            )

        loop.reconcile_once()
        assert loop.unanswered_seconds == 0
        database.close()
        proxy.black_hole()
        loop.reconcile_once()
        assert loop.unanswered_seconds >= 1
        assert loop.has_failed
        assert age() >= 1
        proxy.passing()
        loop.reconcile_once()
        assert loop.unanswered_seconds == 0
        database.close()


@pytest.fixture
def woken(patient, monkeypatch):
    """Let a look wake loops that only note it; return which it wakes."""

    def look(*, failed=()):
        found = []
        monkeypatch.setattr(BatchLoop, "start_turn", lambda loop: found.append(loop.name))
        loops = [
            BatchLoop(batch, patient, broken=threading.Event(), stop_requests=SimpleQueue())
            for batch in BATCHES.values()
        ]
        for loop in loops:
            loop.has_failed = loop.name in failed
        BatchWatch(loops, patient).wake_loops()
        database.connect(reuse_if_open=True)
        return set(found)

    Batch.register(BATCHES)
    for name in BATCHES:
        JobRun.record_ticks(name, [NOON + HOUR], "missed", by="me")
    clock_is(NOON + HOUR)
    return look


def test_a_look_wakes_the_loops_of_the_batches_that_need_a_turn_and_no_other(woken):
    Batch.update(registered_at=DAWN).execute()
    quiet = woken()
    JobRun.claim_manual(BATCH.name, by="me")

    assert (quiet, woken()) == (set(), {BATCH.name})


def test_a_loop_whose_turn_has_failed_is_woken_whatever_the_look_finds(woken):
    Batch.update(registered_at=DAWN).execute()

    assert woken(failed={"prune"}) == {"prune"}


def test_if_the_look_fails_every_loop_takes_a_turn(woken):
    database.execute_sql("alter table job_runs rename to elsewhere")
    try:
        assert woken() == {*BATCHES}
    finally:
        database.execute_sql("alter table elsewhere rename to job_runs")


def test_a_run_that_is_lost_between_ticks_is_sent_again_though_no_tick_is_due(loops, ledger):
    settings = ledger.model_copy(update={"poll_interval": timedelta(seconds=0.05)})
    loop = loops(BATCH, settings.model_copy(update={"cron_user_status_cleanup": None}))
    watch = BatchWatch([loop], settings.model_copy(update={"cron_user_status_cleanup": None}))
    loop.start()
    watch.start()
    try:
        JobRun.claim_manual(BATCH.name, by="me")
        assert wait_until(lambda: rows("enqueued") == {None}, LIMIT)
    finally:
        watch.stopped.set()
        watch.join()


def test_a_row_that_cannot_be_read_fails_its_batch_and_ages_no_heartbeat(loops, patient, monkeypatch):
    loop = loops(BATCH, patient)

    def unreadable(*_arguments, **_facts):
        raise OverflowError

    monkeypatch.setattr(scheduler, "reconcile_batch", unreadable)
    loop.reconcile_once()

    assert (loop.has_failed, loop.unanswered_seconds) == (True, 0)
    database.connect(reuse_if_open=True)


@whole_only
def test_a_scheduler_whose_stopper_has_died_ends():
    command, root = [sys.executable, "-c", BROKEN_STOPPER], Path(__file__).parents[2]

    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)

    assert ended.stdout == "asked to end: None\n"
    assert "the thread 'stopper' ended" in ended.stderr
