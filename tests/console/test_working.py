"""Queues, processes, leases and buckets, as the commands say them."""

from datetime import timedelta

import pytest

from forgekeeper.api.batches import list_queues
from forgekeeper.ledger.heartbeats import Process
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import now
from tests.harness.artifacts import buckets
from tests.harness.html import read_rows
from tests.harness.leases import hold_lease

SCRIPT = "<script>alert(1)</script>"


@pytest.fixture
def known(database):
    """Enter a process that was heard of *ago*, and counts as silent after a minute."""

    def enter(kind="worker", ago=timedelta(0), **facts):
        at = now() - ago
        row = {"host": "forge-1", "pid": 7, "version": "0.9", "started_at": at - timedelta(hours=2), "alive_at": at}
        return Process.create(kind=kind, silent_from=at + timedelta(minutes=1), **(row | facts))

    return enter


def rows(text, caption):
    """Return the rows of the table with that caption, each cell as its words."""
    return [[cell.split() for cell in row] for row in read_rows(text, caption)]


def test_every_queue_has_a_row_with_who_serves_it(seen, known):
    served, *_ = list_queues()
    known(queues=[served])

    shown = {row[0][0]: row[-1] for row in rows(seen("/processes").text, "Queues")}

    assert shown == {queue: ["1"] if queue == served else ["none"] for queue in list_queues()}


def test_a_process_that_fell_silent_is_called_silent_and_its_work_is_nobodys(seen, known):
    work = [{"what": "prune", "message_id": "m", "run": 12, "seconds": 90.0}]
    known(pid=7, at_work=work)
    known(pid=8, at_work=work, ago=timedelta(minutes=5))

    text = seen("/processes").text

    assert {row[0][0]: row[2][-1] for row in rows(text, "Processes")} == {"forge-1:7": "alive", "forge-1:8": "silent"}
    assert [(row[0], row[2], row[3]) for row in rows(text, "At work")] == [(["prune"], ["12"], ["forge-1:7"])]


def test_what_is_wrong_with_the_processes_is_said_as_the_command_says_it(seen):
    assert "no scheduler is running: due runs are not sent" in seen("/processes").text


def test_scripts_in_what_processes_say_of_themselves_are_escaped(seen, known):
    known(version=SCRIPT, host=SCRIPT, queues=[SCRIPT], at_work=[{"what": SCRIPT, "message_id": "m", "seconds": 1.0}])

    text = seen("/processes").text

    assert SCRIPT not in text
    assert "&lt;script&gt;" in text


def test_a_lease_is_listed_with_its_holder(seen):
    with hold_lease(client, "clean_project_refs:7", ttl=timedelta(minutes=1), holder="forge-1:7"):
        shown = rows(seen("/leases").text, "Held leases")

    assert [row[:2] for row in shown] == [[["clean_project_refs:7"], ["forge-1:7"]]]


def test_every_bucket_is_listed_free_or_taken(seen):
    buckets.tidy(client, 3, silent_for=timedelta(minutes=10))
    with buckets.hold_bucket(client, 3) as bucket:
        shown = rows(seen("/leases").text, "Buckets")

    assert sorted(row[0][0] for row in shown) == ["available", "available", "occupied"]
    assert f"number={bucket.number}" in shown[-1][1]


def test_the_page_says_that_what_is_held_is_not_known_where_redis_is_away(seen):

    assert "The leases are not known" in seen("/leases", redis_url="redis://127.0.0.1:1/0").text
    assert "?" in rows(seen("/processes", redis_url="redis://127.0.0.1:1/0").text, "Queues")[0][1]
