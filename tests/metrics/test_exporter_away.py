"""What the exporter says while servers, tables or stores are away: the rest, within two seconds."""

import json
import socket
import threading
import time
from contextlib import closing, suppress
from datetime import timedelta
from urllib.parse import urlsplit

import psycopg2
import pytest
from prometheus_client import generate_latest

from forgekeeper.database import database
from forgekeeper.observing.probe import Probe
from forgekeeper.storage import sentinel
from metrics import exporter
from tests.harness.catalogue import LABELS
from tests.harness.installation import INSTALLATION
from tests.harness.ports import free_ports
from tests.harness.programs import Program
from tests.harness.waiting import wait_until

IN_REDIS = {"queues", "leases", "uploads"}
IN_BOTH = {"buckets", "clocks", "dead_letters"}
WITHOUT_BOTH = {"roots"}
PROMISED = 2.0
"""Seconds that a scrape takes at most, whatever is away."""
TRIES = 4
"""So often may the machine be busy elsewhere for some of them."""
LIMIT = 30.0


@pytest.fixture
def start(database, settings, tmp_path):
    """Start `forgekeeper exporter` as a process; return it and its URL."""
    running = []

    def begin(**changed):
        (port,) = free_ports(1)
        environment = {"METRICS_PORT_EXPORTER": port, **changed}
        running.append(
            Program(tmp_path / f"exporter-{len(running)}.log", "-m", "forgekeeper.cli", "exporter", **environment)
        )
        return running[-1], f"http://127.0.0.1:{port}/metrics"

    yield begin
    for program in running:
        program.kill()


@pytest.fixture
def black_hole():
    """The port of a server that accepts everybody and never says anything."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:
        yield silent.getsockname()[1]


def test_a_store_that_never_answers_is_unreadable_and_hides_no_other(look, tmp_path, settings, black_hole):
    sentinel.Folder(tmp_path).create_sentinel(INSTALLATION)
    silent = f"s3://bucket?endpoint=http://127.0.0.1:{black_hole}&allow_http=true&region=x&access_key_id=a&secret_access_key=b"
    configured = type(settings)(object_stores=json.dumps({"s": silent, "f": tmp_path.as_uri()})).object_stores

    page = look(object_stores=configured)

    assert page.series("root_readable") == {("s",): 0, ("f",): 1}
    assert page.value("exporter_collector_success", collector="roots") == 1


def away(page):
    return {name for (name,), worked in page.series("exporter_collector_success").items() if not worked}


def timed(scrape, url):
    began = time.monotonic()
    page = scrape(url)
    return page, time.monotonic() - began


@pytest.fixture
def first_scrape(start, scrape):
    """Ask an exporter for the first time; another, where the machine did not let it *miss* just that in time."""

    def ask(miss, **changed):
        for _ in range(TRIES):
            _, url = start(**changed)
            assert listening(url)
            page, seconds = timed(scrape, url)
            if (away(page), seconds < PROMISED) == (miss, True):
                break
        return page, seconds

    return ask


@pytest.mark.parametrize("how", ["closed", "silent"])
def test_with_the_database_away_a_scrape_takes_two_seconds_and_says_what_is_missing(first_scrape, black_hole, how):
    port = black_hole if how == "silent" else 1
    missing = set(LABELS.collectors) - IN_REDIS - WITHOUT_BOTH

    page, seconds = first_scrape(missing, DATABASE_URL=f"postgresql://forge:hunter2@127.0.0.1:{port}/x")

    assert seconds < PROMISED
    assert away(page) == missing
    assert page.value("queue_messages", queue_name="cron", state="ready") == 0


@pytest.mark.parametrize("how", ["closed", "silent"])
def test_with_redis_away_a_scrape_takes_two_seconds_and_says_what_is_missing(first_scrape, black_hole, how):
    port = black_hole if how == "silent" else 1
    missing = IN_REDIS | IN_BOTH

    page, seconds = first_scrape(missing, REDIS_URL=f"redis://127.0.0.1:{port}/0")

    assert seconds < PROMISED
    assert away(page) == missing
    assert page.value("backlog_records", batch="user_status_cleanup", record="user_status") == 0


def listening(url):
    """Wait for somebody to listen there; nothing is asked of him yet."""

    def connects():
        with suppress(OSError), socket.create_connection(("127.0.0.1", urlsplit(url).port)):
            return True
        return False

    return wait_until(connects, LIMIT)


def test_a_table_that_is_locked_takes_one_collector_away(urls, look):
    patience = exporter.PATIENCE
    with closing(psycopg2.connect(urls.database)) as other, other.cursor() as cursor:
        cursor.execute("lock table user_statuses in access exclusive mode")

        for _ in range(TRIES):
            began = time.monotonic()
            page = look(patience=patience)
            seconds = time.monotonic() - began
            if (away(page), seconds < PROMISED) == ({"user_statuses"}, True):
                break

    assert seconds < PROMISED
    assert away(page) == {"user_statuses"}


def test_a_table_that_is_missing_takes_one_collector_away(look):
    database.execute_sql("alter table bulk_imports rename to elsewhere")
    try:
        page = look()
    finally:
        database.execute_sql("alter table elsewhere rename to bulk_imports")

    assert away(page) == {"imports"}


def test_many_scrapes_at_once_ask_the_servers_once(database, settings, monkeypatch):
    monkeypatch.setattr(exporter, "CACHE", LIMIT)
    shown = exporter.registry(settings)
    pages = []
    threads = [threading.Thread(target=lambda: pages.append(generate_latest(shown))) for _ in range(8)]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(set(pages)) == 1


def test_an_exporter_ends_when_told_to(start, scrape_when_up):
    program, url = start()
    scrape_when_up(url)

    assert program.end() == 0


def test_a_clock_of_the_database_that_is_ahead_is_measured_against_redis_and_the_host(start, scrape_when_up, ahead):
    _, url = start(DATABASE_URL=ahead(timedelta(days=1)))

    offsets = scrape_when_up(url).series("clock_offset_seconds")

    assert offsets["postgresql", "host"] == pytest.approx(86400, abs=5)
    assert offsets["postgresql", "redis"] == pytest.approx(86400, abs=5)
    assert offsets["redis", "host"] == pytest.approx(0, abs=5)


def test_a_probe_for_which_no_thread_can_be_had_has_no_answer_and_is_asked_the_next_time():
    probe = Probe("queues", lambda: "answer")
    ordinary = threading.stack_size(1 << 46)  # more memory than there is
    try:
        probe.begin()
    finally:
        threading.stack_size(ordinary)
    until = time.monotonic() + PROMISED
    without = probe.wait(until)

    probe.begin()

    assert (without, probe.wait(until)) == (None, "answer")
