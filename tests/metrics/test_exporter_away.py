"""What the exporter says while servers, tables or stores are away: the rest, within two seconds."""

import json
import socket
import time
from contextlib import suppress
from datetime import timedelta

import pytest

from forgekeeper.targets import sentinel
from tests.harness.catalogue import SERIES
from tests.harness.installation import INSTALLATION
from tests.harness.thorough import whole_only
from tests.harness.waiting import scale_timeout, wait_until

IN_REDIS = {"queues", "leases", "uploads"}
IN_BOTH = {"buckets", "clocks"}
WITHOUT_BOTH = {"roots"}
PROMISED = 2.0
"""Seconds that a scrape takes at most, whatever is away."""
LIMIT = 30.0


@pytest.fixture
def black_hole():
    """The port of a server that accepts everybody and never says anything."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:
        yield silent.getsockname()[1]


@whole_only
def test_a_store_that_never_answers_is_unreadable_and_hides_no_other(look, tmp_path, settings, black_hole):
    sentinel.Folder(tmp_path).create_sentinel(INSTALLATION)
    silent = f"s3://bucket?endpoint=http://127.0.0.1:{black_hole}&allow_http=true&region=x&access_key_id=a&secret_access_key=b"
    configured = type(settings)(object_stores=json.dumps({"s": silent, "f": tmp_path.as_uri()})).object_stores

    page = look(object_stores=configured)

    assert page.series("root_readable") == {("s",): 0, ("f",): 1}
    assert page.value("exporter_collector_success", collector="roots") == 1


def away(page):
    return {name for (name,), worked in page.series("exporter_collector_success").items() if not worked}


DATABASE = {name for (name,) in SERIES["collectors"]} - IN_REDIS - WITHOUT_BOTH
AWAY = {
    "the database": (DATABASE, "queue_messages", {"DATABASE_URL": "postgresql://forge:hunter2@127.0.0.1:{port}/x"}),
    "Redis": (IN_REDIS | IN_BOTH, "backlog_records", {"REDIS_URL": "redis://127.0.0.1:{port}/0"}),
}


@whole_only
@pytest.mark.usefixtures("database")
@pytest.mark.parametrize("how", ["closed", "silent"])
@pytest.mark.parametrize("server", AWAY)
def test_with_a_server_away_a_scrape_takes_two_seconds_and_says_what_is_missing(start, scrape, black_hole, server, how):
    missing, there, leads = AWAY[server]
    port = black_hole if how == "silent" else 1
    _, url = start("exporter", **{name: url.format(port=port) for name, url in leads.items()})

    def in_time():
        with suppress(OSError):  # it has not started yet
            began = time.monotonic()
            page = scrape(url)
            seconds = time.monotonic() - began
            return (
                seconds < scale_timeout(PROMISED) and away(page) == missing and set(page.series(there).values()) == {0}
            )

    # The machine may be busy elsewhere for some scrapes.
    assert wait_until(in_time, LIMIT)


def test_a_table_that_is_locked_takes_one_collector_away(look, other):
    other.execute("lock table user_statuses in access exclusive mode")
    try:
        # The statement is given up after two seconds.
        page = look()
    finally:
        other.connection.rollback()

    assert away(page) == {"user_statuses"}


def test_a_clock_of_the_database_that_is_ahead_is_measured_and_the_exporter_ends_when_asked(
    start, scrape_when_up, url_with_clock_ahead
):
    program, url = start("exporter", DATABASE_URL=url_with_clock_ahead(timedelta(days=1)))

    offsets = scrape_when_up(url).series("clock_offset_seconds")

    assert offsets["postgresql", "host"] == pytest.approx(86400, abs=5)
    assert offsets["postgresql", "redis"] == pytest.approx(86400, abs=5)
    assert offsets["redis", "host"] == pytest.approx(0, abs=5)
    assert program.end() == 0
