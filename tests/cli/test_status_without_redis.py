"""`status` and `check` where Redis is frozen, full or another installation's: PostgreSQL alone answers, within two seconds."""

import os
import signal
import time
from contextlib import contextmanager

import pytest

from forgekeeper.installation import INSTALLATION
from forgekeeper.runs.ledger import JobRun
from tests.harness import installation
from tests.harness.waiting import patient

NAME = "user_status_cleanup"
WITHIN = 2.0
"""Seconds that the issue allows; the look itself has to leave room for a crowded machine."""

pytestmark = pytest.mark.usefixtures("database")


@contextmanager
def frozen(server):
    """Stop the Redis's process: its kernel accepts connections, and it does not answer."""
    pid = server.info("server")["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def full(server):
    server.config_set("maxmemory", "1")
    try:
        yield
    finally:
        server.config_set("maxmemory", "0")


@contextmanager
def of_another(server):
    server.set(INSTALLATION, "3f0b4f0e-0000-4000-8000-000000000000")
    yield


@pytest.fixture(autouse=True)
def ours(database, server):
    server.set(INSTALLATION, installation.INSTALLATION)
    yield
    server.set(INSTALLATION, installation.INSTALLATION)


@pytest.mark.parametrize("spoil", [frozen, of_another])
def test_status_answers_from_postgresql_alone_within_two_seconds(main, server, spoil):
    JobRun.succeed(JobRun.start_here(NAME, by="forge-1:2"), {"deleted": 7})

    with spoil(server):
        began = time.monotonic()
        result = main("status", "--json")
        lasted = time.monotonic() - began

    shown = result.json
    assert (result.status, lasted < patient(WITHIN)) == (0, True), lasted
    assert shown["batches"][NAME]["last"]["result"] == {"deleted": 7}
    assert (shown["batches"]["stale_direct_uploads"]["backlog"], shown["leases"], shown["buckets"]) == (None,) * 3
    assert (shown["queues"]["cron"]["ready"], shown["queues"]["cron"]["workers"]) == (None, 0)
    assert shown["warnings"][0] == shown["redis"]["trouble"]


def test_status_for_people_shows_a_question_mark_for_what_it_could_not_ask(main, server):
    with frozen(server):
        result = main("status")

    assert (result.status, "Leases held: ?." in result.stdout) == (0, True)
    assert "warning: cannot use Redis: " in result.stdout


def test_a_redis_that_is_full_is_asked_for_what_it_still_says_and_check_says_that_it_is_full(main, server):
    with full(server):
        shown, checked = main("status", "--json").json, main("check", "--json")

    assert shown["queues"]["cron"]["ready"] == 0
    said = [message for _level, message in checked.findings("redis") if "it is full: give it more memory" in message]
    assert (checked.status, len(said)) == (1, 1)


def test_a_check_of_a_redis_that_takes_writes_changes_nothing_in_it(main, server):
    server.delete(INSTALLATION)

    main("check")

    assert server.get(INSTALLATION) is None
