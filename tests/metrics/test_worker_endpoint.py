"""The endpoint of all processes of a worker: it counts, through a drain, a death and a reload."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from dramatiq import Message

from forgekeeper.api.batches import CHILDREN
from forgekeeper.delivery import queues
from forgekeeper.delivery.broker import broker
from forgekeeper.delivery.children import send_children
from forgekeeper.ledger.quarantine import Quarantined
from forgekeeper.ledger.retry_delays import MAX_RETRIES
from forgekeeper.platform.database import now
from forgekeeper.platform.settings import PREFIX
from models import GitRefDeletion
from tests.harness.catalogue import select_process_metrics
from tests.harness.programs import LIMIT
from tests.harness.thorough import whole_only
from tests.harness.waiting import wait_until

from .worker import NAME, PATIENT, ROOT, due


@whole_only
def test_every_series_is_there_at_zero_before_the_first_message(start_worker, scrape_when_up, promtool):
    worker = start_worker()
    assert wait_until(worker.is_up, LIMIT)

    page = scrape_when_up(worker.url)

    assert promtool(page.text) == ""
    for metric in select_process_metrics("worker"):
        suffix = "_count" if metric.type == "histogram" else ""
        found = page.series(metric.name.removeprefix("forgekeeper_") + suffix)
        assert len(found) == len(metric.children), metric.name
        assert metric.name == "forgekeeper_log_messages_total" or set(found.values()) == {0}, metric.name


@whole_only
def test_a_run_is_counted_with_what_it_did(start_worker, send, counts, scrape, promtool):
    due(3)
    worker = start_worker(processes=2)

    send()

    assert counts(worker, 1, "runs_total", batch=NAME)
    assert counts(worker, 0, "runs_in_progress", batch=NAME)
    page = scrape(worker.url)
    assert promtool(page.text) == ""
    assert page.value("records_processed_total", batch=NAME, record="user_status") == 3
    assert page.value("run_duration_seconds_count", batch=NAME) == 1
    assert page.value("run_wait_seconds_count", batch=NAME) == 1
    assert page.value("log_messages_total", level="info") > 0


CHILD = CHILDREN["clean_project_refs"]


def send_child(project):
    send_children(broker, None, CHILD, [(str(project), (project,))], limit_depth=None)


@whole_only
def test_a_child_is_retried_until_its_last_failure_which_is_a_dead_letter_and_a_breach(start_worker, counts):
    worker = start_worker()
    for project in (1, 2):
        GitRefDeletion.create(project_id=project, ref="refs/x")
    Quarantined.create(
        batch=CHILD.batch.name,
        record=CHILD.name,
        key="2",
        reason="child_failed",
        error="x",
        failures=MAX_RETRIES,
        since=now(),
        failed_at=now(),
    )

    send_child(1)
    send_child(2)

    labels = {"batch": CHILD.name}
    assert counts(worker, 2, "run_failures_total", error_kind="gitaly", **labels)
    assert counts(worker, 1, "run_dead_letters_total", **labels)
    assert counts(worker, 1, "run_retries_total", **labels)
    assert counts(worker, 1, "threshold_breaches_total", threshold="dead_letter", **labels)
    assert counts(worker, 2, "lease_acquisitions_total", lease=CHILD.name)


@whole_only
def test_a_message_of_an_unknown_actor_is_a_dead_letter_of_an_unknown_batch(start_worker, counts):
    broker.client.hset(queues.bodies_key("git"), "bad", Message("git", "nobody", (), {}, {}).encode())
    broker.client.rpush(queues.ready_key("git"), "bad")

    assert counts(start_worker(), 1, "run_dead_letters_total", batch="unknown")


def test_a_worker_whose_port_is_busy_does_not_start(start_worker):
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        port = somebody.getsockname()[1]
        worker = start_worker(METRICS_PORT_WORKER=port)

        status = worker.process.wait(LIMIT)

    (line,) = [line for line in worker.log.read_text().splitlines() if not line.startswith("{")]
    assert line.startswith(f"forgekeeper: cannot serve metrics at 127.0.0.1:{port}: Address already in use; ")
    assert (status, worker.folders) == (1, [])


@whole_only
def test_the_folder_is_private_and_replaces_those_of_workers_that_have_ended(start_worker, scrape_when_up, tmp_path):
    nobodys = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    abandoned, alive = (
        Path(tempfile.mkdtemp(prefix=f"forgekeeper-worker-{socket.gethostname()}-{pid}-", dir=tmp_path))
        for pid in (nobodys, os.getpid())
    )

    worker = start_worker()
    scrape_when_up(worker.url)

    (own,) = set(worker.folders) - {alive}
    assert own.stat().st_mode & 0o777 == 0o700
    assert (abandoned.exists(), alive.exists()) == (False, True)


@whole_only
def test_workers_that_forgekeeper_has_not_prepared_do_not_start(settings, monkeypatch):
    monkeypatch.setenv(PREFIX + "METRICS_PORT_WORKER", "9191")

    refused = subprocess.run(
        [sys.executable, "-m", "forgekeeper.process"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert refused.returncode == 2
    assert refused.stderr == (
        "forgekeeper: start workers with `forgekeeper worker`, which prepares the files of their metrics\n"
    )


@whole_only
def test_it_serves_while_the_worker_drains_and_ends_with_it(start_worker, send, counts, scrape, table_lock):
    worker = start_worker(**PATIENT)
    send()
    assert counts(worker, 1, "runs_in_progress", batch=NAME)

    worker.process.terminate()
    assert wait_until(lambda: "worker draining" in worker.log.read_text(), LIMIT)
    draining = scrape(worker.url)
    table_lock.rollback()
    status = worker.process.wait(LIMIT)

    assert draining.value("runs_in_progress", batch=NAME) == 1
    assert status == 0
    assert wait_until(lambda: not worker.listens() and not worker.folders, LIMIT)


@whole_only
def test_what_a_killed_process_has_counted_stays(start_worker, send, counts, scrape):
    due(3)
    worker = start_worker(processes=2, **PATIENT)
    send()
    assert counts(worker, 1, "runs_total", batch=NAME)
    assert wait_until(worker.is_up, LIMIT)

    (one, other) = worker.children
    os.kill(other, signal.SIGSTOP)  # the other one keeps the worker up, as a long drain would
    os.kill(one, signal.SIGKILL)
    after = scrape(worker.url)
    os.kill(other, signal.SIGKILL)

    assert after.value("runs_total", batch=NAME) == 1
    assert after.value("records_processed_total", batch=NAME, record="user_status") == 3


@whole_only
def test_an_endpoint_that_is_killed_is_started_again_with_all_that_was_counted(
    start_worker, send, counts, scrape_when_up
):
    worker = start_worker()
    send()
    assert counts(worker, 1, "runs_total", batch=NAME)

    os.kill(worker.endpoint, signal.SIGKILL)

    assert scrape_when_up(worker.url).value("runs_total", batch=NAME) == 1
    assert worker.log.read_text().count("metrics endpoint ended") == 1
    assert worker.process.poll() is None


@whole_only
def test_a_worker_that_reloads_goes_on_counting(start_worker, send, counts):
    worker = start_worker()
    send()
    assert counts(worker, 1, "runs_total", batch=NAME)
    before = worker.children

    worker.process.send_signal(signal.SIGHUP)

    assert wait_until(lambda: worker.children and not set(worker.children) & set(before), LIMIT)
    send()
    assert counts(worker, 2, "runs_total", batch=NAME)
    assert worker.process.poll() is None


@whole_only
def test_a_killed_master_frees_the_port_at_once(start_worker, send, counts, table_lock):
    worker = start_worker(**PATIENT)
    send()
    assert counts(worker, 1, "runs_in_progress", batch=NAME)
    assert wait_until(worker.is_up, LIMIT)

    worker.process.kill()

    assert wait_until(lambda: not worker.listens(), LIMIT)
    table_lock.rollback()


@whole_only
def test_each_process_of_a_worker_gives_signs_of_life(start_worker):
    worker = start_worker(processes=2)
    assert wait_until(worker.is_up, LIMIT)
    (folder,) = worker.folders
    signs = lambda: {file.name: float(file.read_text() or 0) for file in folder.glob("*.ready")}  # noqa: E731
    assert wait_until(lambda: len(signs()) == 2, LIMIT)
    first = signs()

    assert wait_until(lambda: all(sign > first[name] for name, sign in signs().items()), LIMIT)
