"""The page of a scheduler: that it lives, what it has sent and what it could not."""

import threading
from datetime import timedelta
from queue import SimpleQueue

import pytest
from prometheus_client import generate_latest

import scheduler
from forgekeeper.api.batches import BATCHES
from forgekeeper.delivery.messages import enqueue_run
from forgekeeper.ledger.holds import Batch, Hold
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.reconcile import SCHEDULER_COUNTERS, reconcile_batch
from forgekeeper.platform.database import database, now
from forgekeeper.platform.settings.cron import Cron
from tests.harness.catalogue import select_process_metrics
from tests.harness.performing import start_run
from tests.harness.waiting import wait_until

from .pages import read

NAME = "user_status_cleanup"
LIMIT = 60.0


@pytest.fixture
def counted(database):
    """Tell by how much this process's counter of the batch has risen."""
    page = lambda: read(generate_latest(SCHEDULER_COUNTERS.registry).decode())  # noqa: E731
    before = page()
    return lambda name: (page().value(name, batch=NAME) or 0) - (before.value(name, batch=NAME) or 0)


@pytest.fixture
def reconcile(settings):
    def turn(expression="0 0 1 1 *", catch_up="once"):
        timetable = {"cron_user_status_cleanup": Cron(expression), "catch_up_user_status_cleanup": catch_up}
        changed = settings.model_copy(update=timetable)
        reconcile_batch(NAME, changed, enqueue_run, by="test")

    return turn


def registered(**ago):
    Batch.register([NAME])
    Batch.update(registered_at=now() - timedelta(**ago)).execute()


def test_a_scheduler_says_that_it_lives_what_it_sends_and_what_comes_next(
    database, start, scrape, scrape_when_up, promtool
):
    due = (now() + timedelta(hours=2)).replace(second=0, microsecond=0)
    schedules = {"CRON_USER_STATUS_CLEANUP": "* * * * * *", "CRON_STALE_IMPORTS": f"{due.minute} {due.hour} * * *"}
    _, url = start("scheduler", **schedules, CRON_PRUNE="off", POLL_INTERVAL="0.5")
    scrape_when_up(url)

    def all_there():
        page = scrape(url)
        # The clock beats once it runs, which may be after a loop's first turn.
        return page.value("scheduler_last_enqueue_timestamp_seconds", batch=NAME) and page.value(
            "scheduler_heartbeat_timestamp_seconds"
        )

    assert wait_until(all_there, LIMIT)
    page = scrape(url)
    instant = now().timestamp()
    assert promtool(page.text) == ""
    assert page.value("scheduler_heartbeat_timestamp_seconds") == pytest.approx(instant, abs=LIMIT)
    assert page.value("scheduler_last_enqueue_timestamp_seconds", batch=NAME) == pytest.approx(instant, abs=LIMIT)
    assert page.value("scheduler_last_enqueue_timestamp_seconds", batch="stale_imports") is None
    assert page.value("scheduler_next_run_timestamp_seconds", batch="stale_imports") == due.timestamp()
    assert page.value("scheduler_next_run_timestamp_seconds", batch="prune") == 0
    for metric in select_process_metrics("scheduler"):
        if metric.type == "counter":
            assert len(page.series(metric.name.removeprefix("forgekeeper_"))) == len(metric.children)


def test_a_message_is_counted_when_it_is_sent_and_not_again(counted, reconcile):
    JobRun.claim_manual(NAME, by="test")

    reconcile()
    reconcile()

    assert counted("scheduler_enqueued_total") == 1


def test_ticks_that_nobody_claimed_in_time_are_misfires(counted, reconcile):
    registered(minutes=5, seconds=30)

    reconcile("* * * * *")

    assert counted("scheduler_misfires_total") in {4, 5}


def running():
    start_run(NAME, JobRun.claim_manual(NAME, by="test"), by="test")


@pytest.mark.parametrize(
    ("begin", "suppressed"),
    [
        (running, 1),
        (lambda: JobRun.claim_manual(NAME, by="test"), 0),
        (lambda: Hold.add(NAME, "pause", until=None, reason=None, by="test"), 0),
    ],
    ids=["running", "queued", "paused"],
)
def test_a_tick_that_does_not_run_is_suppressed_while_another_runs_and_never_missed(
    counted, reconcile, begin, suppressed
):
    tick = now()  # its minute has been due once since the batch is known, whenever it began
    registered(minutes=2)
    begin()

    reconcile(f"{tick.minute} {tick.hour} * * *")

    assert JobRun.newest_tick(NAME)
    assert counted("scheduler_max_instances_total") == suppressed
    assert counted("scheduler_misfires_total") == 0


def test_a_run_that_is_taken_from_a_silent_worker_is_counted(counted, reconcile):
    running()
    JobRun.update(alive_at=now() - timedelta(hours=1)).execute()

    reconcile()

    assert counted("scheduler_runs_reopened_total") == 1


def test_a_turn_that_raises_is_a_failure_to_send(counted, settings):
    loop = scheduler.BatchLoop(BATCHES[NAME], settings, broken=threading.Event(), stop_requests=SimpleQueue())
    # In a thread of its own, as always: it throws its connection away.
    turn = threading.Thread(target=loop.reconcile_once)
    database.execute_sql("alter table job_runs rename to elsewhere")
    try:
        turn.start()
        turn.join()
    finally:
        database.execute_sql("alter table elsewhere rename to job_runs")

    assert counted("scheduler_enqueue_failures_total") == 1
