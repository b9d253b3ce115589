"""The page of a worker that drains, whose processes are killed, or that is killed itself."""

import os
import signal

from tests.harness.programs import LIMIT
from tests.harness.waiting import wait_until

from .worker import NAME, PATIENT, due


def test_the_page_is_served_while_the_worker_drains_and_ends_with_it(start_worker, send, counts, scrape, table_lock):
    worker = start_worker(**PATIENT)
    send()
    assert counts(worker, 1, "runs_in_progress", batch=NAME)

    worker.process.terminate()
    assert wait_until(lambda: "worker draining" in worker.log.read_text(), LIMIT)
    draining = scrape(worker.url)
    table_lock.close()
    status = worker.process.wait(LIMIT)

    assert draining.value("runs_in_progress", batch=NAME) == 1
    assert status == 0
    assert wait_until(lambda: not worker.listens(), LIMIT)
    assert wait_until(lambda: not worker.folders, LIMIT)


def test_what_a_killed_process_has_counted_stays_and_a_restart_begins_anew(start_worker, send, counts, scrape):
    due(3)
    worker = start_worker(processes=2, **PATIENT)
    send()
    # The last of its figures.
    assert counts(worker, 1, "run_wait_seconds_count", batch=NAME)
    assert wait_until(worker.is_up, LIMIT)

    (one, other) = worker.children
    os.kill(other, signal.SIGSTOP)  # the other one holds the page up, as a long drain would
    os.kill(one, signal.SIGKILL)
    after = scrape(worker.url)
    os.kill(other, signal.SIGKILL)
    worker.process.wait(LIMIT)
    assert wait_until(lambda: not worker.listens(), LIMIT)
    again = start_worker(processes=2)
    send()

    assert after.value("runs_total", batch=NAME) == 1
    assert after.value("records_processed_total", batch=NAME, record="user_status") == 3
    assert counts(again, 1, "runs_total", batch=NAME)


def test_a_page_that_is_killed_is_served_again_with_all_that_was_counted_also_after_a_reload(
    start_worker, send, counts, scrape_when_up
):
    worker = start_worker()
    send()
    assert counts(worker, 1, "runs_total", batch=NAME)

    os.kill(worker.page, signal.SIGKILL)
    assert scrape_when_up(worker.url).value("runs_total", batch=NAME) == 1
    before = worker.children
    worker.process.send_signal(signal.SIGHUP)
    assert wait_until(lambda: worker.children and not set(worker.children) & set(before), LIMIT)
    os.kill(worker.page, signal.SIGKILL)

    assert scrape_when_up(worker.url).value("runs_total", batch=NAME) == 1
    assert worker.log.read_text().count("metrics page has ended") == 2
    assert worker.process.poll() is None


def test_a_worker_that_is_told_to_reload_comes_up_again_and_goes_on_counting(start_worker, send, counts):
    worker = start_worker()
    send()
    assert counts(worker, 1, "runs_total", batch=NAME)
    before = worker.children

    worker.process.send_signal(signal.SIGHUP)

    assert wait_until(lambda: worker.children and not set(worker.children) & set(before), LIMIT)
    send()
    assert counts(worker, 2, "runs_total", batch=NAME)
    assert worker.process.poll() is None


def test_a_killed_master_frees_the_port_at_once_and_the_folder_when_its_workers_have_ended(
    start_worker, send, counts, table_lock
):
    worker = start_worker(**PATIENT)
    send()
    assert counts(worker, 1, "runs_in_progress", batch=NAME)
    assert wait_until(worker.is_up, LIMIT)

    worker.process.kill()

    assert wait_until(lambda: not worker.listens(), LIMIT)
    assert len(worker.folders) == 1
    table_lock.close()
    assert wait_until(lambda: not worker.folders, LIMIT)
