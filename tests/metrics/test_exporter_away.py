"""What the exporter says while servers, tables or stores are away: the rest, within two seconds."""

import json
import socket
import time
from contextlib import closing, suppress
from datetime import timedelta
from urllib.parse import urlsplit

import psycopg2
import pytest

from forgekeeper.database import database
from forgekeeper.storage import sentinel
from metrics import exporter
from tests.harness.catalogue import SERIES
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


DATABASE = {name for (name,) in SERIES["collectors"]} - IN_REDIS - WITHOUT_BOTH
AWAY = {
    "the database": (DATABASE, {"DATABASE_URL": "postgresql://forge:hunter2@127.0.0.1:{port}/x"}),
    "Redis": (IN_REDIS | IN_BOTH, {"REDIS_URL": "redis://127.0.0.1:{port}/0"}),
}


@pytest.mark.parametrize("how", ["closed", "silent"])
@pytest.mark.parametrize(("missing", "leads"), AWAY.values(), ids=AWAY)
def test_with_a_server_away_a_scrape_takes_two_seconds_and_says_what_is_missing(
    first_scrape, black_hole, missing, leads, how
):
    port = black_hole if how == "silent" else 1

    page, seconds = first_scrape(missing, **{name: url.format(port=port) for name, url in leads.items()})

    assert seconds < PROMISED
    assert away(page) == missing
    there = ("queue_messages", "backlog_records")["REDIS_URL" in leads]
    assert set(page.series(there).values()) == {0}


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


def test_a_clock_of_the_database_that_is_ahead_is_measured_and_the_exporter_ends_when_asked(
    start, scrape_when_up, ahead
):
    program, url = start(DATABASE_URL=ahead(timedelta(days=1)))

    offsets = scrape_when_up(url).series("clock_offset_seconds")

    assert offsets["postgresql", "host"] == pytest.approx(86400, abs=5)
    assert offsets["postgresql", "redis"] == pytest.approx(86400, abs=5)
    assert offsets["redis", "host"] == pytest.approx(0, abs=5)
    assert program.end() == 0
