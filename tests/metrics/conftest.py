"""Pages of metrics: fetched, and looked at by promtool."""

import os
import shutil
import subprocess
import urllib.request
from contextlib import closing, suppress

import psycopg2
import pytest
from prometheus_client import generate_latest

from forgekeeper.delivery.ledger import deliver
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.reconcile import reconcile
from metrics import exporter
from tests.harness.ports import free_ports
from tests.harness.programs import LIMIT
from tests.harness.waiting import wait_until

from .pages import read
from .worker import NAME, WorkerWithPage


@pytest.fixture
def scrape():
    """Read the page at a URL."""

    def get(url, timeout=LIMIT):
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return read(answer.read().decode())

    return get


@pytest.fixture
def scrape_when_up(scrape):
    """Read the page at a URL as soon as it is there."""

    def get(url, limit=LIMIT):
        def try_it():
            try:
                return scrape(url)
            except OSError:
                return None

        found = []
        assert wait_until(lambda: found.append(try_it()) or found[-1] is not None, limit), f"nothing at {url}"
        return found[-1]

    return get


@pytest.fixture
def promtool():
    """Check a page as promtool does; return what it has against it."""
    program = shutil.which("promtool")
    if program is None:
        assert "CI" not in os.environ, "promtool is missing: .ci/run installs it from Debian's package prometheus"
        pytest.skip("promtool is not installed; in CI it is")

    def check(text):
        checked = subprocess.run([program, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
        return checked.stdout + checked.stderr

    return check


@pytest.fixture
def free_port():
    """A port that nobody listens at."""
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
    """Send a run of the batch by hand."""

    def put():
        quick = settings.model_copy(update={"cron_user_status_cleanup": None})
        JobRun.claim_manual(NAME, by="test")
        reconcile(NAME, quick, deliver, by="test")

    return put


@pytest.fixture
def table_lock(urls):
    """Keep every run of the batch waiting, until closed."""
    with closing(psycopg2.connect(urls.database)) as connection, connection.cursor() as cursor:
        cursor.execute("lock table user_statuses in access exclusive mode")
        yield connection


@pytest.fixture
def look(database, settings, monkeypatch):
    """Scrape an exporter of our own, with settings of one's choice; it waits for a busy machine."""

    def collect(*, patience=30.0, **changed):
        monkeypatch.setattr(exporter, "PATIENCE", patience)
        return read(generate_latest(exporter.registry(settings.model_copy(update=changed))).decode())

    return collect
