"""Scrape metrics endpoints, and check pages with promtool."""

import io
import logging
import urllib.request
from contextlib import suppress

import pytest
import structlog
from prometheus_client import generate_latest

from forgekeeper import exporter
from forgekeeper.delivery.messages import enqueue_run
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.reconcile import reconcile_batch
from metrics import logs
from tests.harness.ports import free_ports
from tests.harness.programs import LIMIT, Program
from tests.harness.waiting import wait_until

from .pages import ran, read
from .worker import NAME, WorkerWithPage


@pytest.fixture
def scrape():
    """Read the page of metrics at a URL."""

    def get(url, timeout=LIMIT):
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return read(answer.read().decode())

    return get


@pytest.fixture
def scrape_when_up(scrape):
    """Read the page of metrics at a URL as soon as the endpoint answers."""

    def get(url):
        found = []

        def there():
            with suppress(OSError):
                found.append(scrape(url))
            return found

        assert wait_until(there, LIMIT), f"nothing at {url}"
        return found[0]

    return get


@pytest.fixture
def promtool():
    """Check a page with promtool; return its complaints."""
    return lambda text: ran("promtool", "check", "metrics", text=text)[1]


@pytest.fixture
def start(settings, free_port, tmp_path):
    """Start `forgekeeper scheduler` or `exporter` with an endpoint; return its process and its URL."""
    running = []

    def begin(command, **changed):
        environment = {f"METRICS_PORT_{command}": free_port, **changed}
        running.append(Program(tmp_path / f"{command}.log", "-m", "forgekeeper.cli", command, **environment))
        return running[-1], f"http://127.0.0.1:{free_port}/metrics"

    yield begin
    for program in running:
        program.kill()


@pytest.fixture
def stream():
    """Stream of the JSON log from level DEBUG; the logging of the test run is restored afterwards."""
    root, output = logging.getLogger(), io.StringIO()
    before = root.handlers[:], root.level, structlog.get_config()
    logs.configure("json", "DEBUG", output)
    yield output
    structlog.contextvars.clear_contextvars()
    root.handlers[:], root.level = before[0], before[1]
    structlog.configure(**before[2])


@pytest.fixture
def free_port():
    """A free port."""
    return free_ports(1)[0]


@pytest.fixture
def start_worker(database, tmp_path, free_port):
    started = []

    def begin(*, processes=1, **settings):
        started.append(WorkerWithPage(tmp_path, free_port, processes, settings))
        return started[-1]

    yield begin
    for worker in started:
        worker.kill()


@pytest.fixture
def counts(scrape):
    """Wait until a series has a value."""

    def until(worker, value, name, **labels):
        def there():
            with suppress(OSError):
                return scrape(worker.url).value(name, **labels) == value

        return wait_until(there, LIMIT)

    return until


@pytest.fixture
def send(settings):
    """Send a manual run of the batch."""

    def put():
        quick = settings.model_copy(update={"cron_user_status_cleanup": None})
        JobRun.claim_manual(NAME, by="test")
        reconcile_batch(NAME, quick, enqueue_run, by="test")

    return put


@pytest.fixture
def table_lock(database, other):
    """Lock the table, so that every run of the batch waits until the connection is rolled back."""
    other.execute("lock table user_statuses in access exclusive mode")
    return other.connection


@pytest.fixture
def look(database, settings, monkeypatch):
    """Scrape an exporter in this process with changed settings, and a timeout for a busy machine."""

    def collect(*, patience=30.0, **changed):
        monkeypatch.setattr(exporter, "SCRAPE_TIMEOUT_SECONDS", patience)
        return read(generate_latest(exporter.create_registry(settings.model_copy(update=changed))).decode())

    return collect
