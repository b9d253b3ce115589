"""Every kind of process on a PostgreSQL that hangs while the kernel takes what it is sent, and afterwards."""

import re
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from datetime import datetime
from itertools import chain

import pytest

from demo.servers import folder
from demo.tables import make_tables
from forgekeeper import migrations
from forgekeeper.batches import BATCHES
from forgekeeper.boot import load
from forgekeeper.connections import Limits, client, connect
from forgekeeper.database import database, now
from forgekeeper.runs.ledger import JobRun
from forgekeeper.settings import PREFIX
from models import UserStatus
from tests.harness import samples as sample
from tests.harness.frozen import Server
from tests.harness.machine import Held
from tests.harness.ports import free_ports
from tests.harness.waiting import wait_until

from .proxy import postgres_through

LIMIT = 60.0
BATCH = "user_status_cleanup"
NETWORK, CONNECTING, SCHEDULER, LOOK, PAGE = 3.0, 2.0, 2.0, 0.5, 2.0
SLACK = 2.0
COMMAND = 10.0
"""Seconds for a command to start in, besides those that it waits for a server."""
OPTIONS = {f"cron_{batch}": "off" for batch in BATCHES} | {
    "dead_after": "2",
    "poll_interval": "0.5",
    "retry_after": "0.5",
    "database_network_timeout": str(NETWORK),
    "database_connect_timeout": str(CONNECTING),
    "log_format": "json",
    f"pace_{BATCH}": "400",
    f"cron_{BATCH}": "* * * * * *",
}
FAILURES = {"scheduler": {"reconcile failed"}, "worker": {"heartbeat failed", "run failed"}}


class Direct:
    """No way to the server but the direct one: it hangs when its processes are stopped."""

    def __init__(self, server):
        self.server, self.url = server, server.url

    def hangs(self):
        return self.server.frozen()


class Pooler:
    """A pooler on the way to the server that goes on listening and does nothing more."""

    def __init__(self, server, stack):
        proxy, self.url = postgres_through(server.url)
        self.proxy = stack.enter_context(proxy)

    @contextmanager
    def hangs(self):
        self.proxy.black_hole()
        yield
        self.proxy.passing()


@pytest.fixture(params=["its processes are stopped", "a pooler is stuck"])
def way(request, settings, monkeypatch):
    """The way to a server of our own, which is migrated and in the settings; the tests themselves go another."""
    with ExitStack() as stack:
        server = Server(stack.enter_context(folder.opened(None)))
        stack.callback(server.stop)
        monkeypatch.setenv(PREFIX + "DATABASE_URL", server.url)
        own = load()
        connect(own, Limits.of_worker(own), name="tests", connections=2)
        stack.callback(database.close_all)
        database.connect()
        migrations.migrate(database.obj)
        make_tables(database.obj)
        client.flushdb()
        way = Direct(server) if request.param == "its processes are stopped" else Pooler(server, stack)
        monkeypatch.setenv(PREFIX + "DATABASE_URL", way.url)
        yield way
        client.connection_pool.disconnect()


def test_a_database_that_hangs_is_noticed_by_every_process_in_its_time_and_nothing_is_lost(way, services, say):
    sample.user_statuses(4_000)
    kept = UserStatus.select().where(UserStatus.clear_status_at.is_null()).count()
    due = UserStatus.due(now())
    (port,) = free_ports(1)
    scheduler, worker = services("scheduler", "scheduler", **OPTIONS), services("worker", "worker", *ONE, **OPTIONS)
    exporter = services("exporter", "exporter", **OPTIONS | {"metrics_port_exporter": str(port)})
    before = due.count()
    assert wait_until(lambda: due.count() < before, LIMIT), "nothing was done"
    assert wait_until(lambda: collected(port) == {"1"}, LIMIT), "the exporter collects nothing"

    processes = [service.process.pid for service in (scheduler, worker, exporter)]
    held = Held(lambda: processes)
    with way.hangs():
        began = time.time()
        assert wait_until(lambda: noticed(scheduler, began) and noticed(worker, began), LIMIT), "nobody says so"
        seconds = {name: noticed(service, began) for name, service in (("scheduler", scheduler), ("worker", worker))}
        pages = []

        def blind():
            asked = time.monotonic()
            told = collected(port)
            pages.append(time.monotonic() - asked)
            return told == {"0"}

        # An answer is kept for some seconds.
        assert wait_until(blind, LIMIT), "the exporter's page does not say so"
        page, asked = max(pages), time.monotonic()
        command = services("status", "status", **OPTIONS)
        assert command.process.wait(LIMIT) == 1
        sentence = command.last_lines(1)[0]
        status = time.monotonic() - asked
        busy = held.seconds()
    said = f"scheduler {seconds['scheduler']:.1f} s, worker {seconds['worker']:.1f} s, page {page:.1f} s"
    say(f"{said}, status {status:.1f} s, the machine held them up for {busy:.1f} s")

    resumed = time.monotonic()
    database.connect(reuse_if_open=True)
    assert wait_until(lambda: due.count() == 0, LIMIT), "it does not go on"
    say(f"all was done {time.monotonic() - resumed:.1f} s later")
    assert seconds["scheduler"] < SCHEDULER + CONNECTING + LOOK + SLACK + busy
    assert seconds["worker"] < NETWORK + 2 / 3 + LOOK + SLACK + busy
    assert page < PAGE + SLACK + busy
    assert "cannot use PostgreSQL" in sentence
    assert status < COMMAND + CONNECTING + busy
    assert [service.process.poll() for service in (scheduler, worker, exporter)] == [None] * 3
    assert UserStatus.select().where(UserStatus.clear_status_at.is_null()).count() == kept
    ticks = list(chain(*JobRun.select(JobRun.tick).where(JobRun.tick.is_null(False)).tuples()))
    assert len(ticks) == len(set(ticks))
    assert wait_until(lambda: collected(port) == {"1"}, LIMIT), "the exporter stays blind"


ONE = ("--processes", "1", "--threads", "3")


def noticed(service, since):
    """Return how long after *since* the service first said that the database fails it, 0.0 if it has not."""
    lines = [line for line in service.lines() if line.get("message") in FAILURES[service.name]]
    moments = [datetime.fromisoformat(line["at"]).timestamp() - since for line in lines]
    return min((moment for moment in moments if moment > 0), default=0.0)


def collected(port):
    """Return what the exporter's page says of the collectors that ask the ledger, as it was then."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT) as page:
            text = page.read().decode()
    except OSError:
        return set()
    return set(re.findall(r'exporter_collector_success{collector="(?:runs|batches)"} (\d)', text))
