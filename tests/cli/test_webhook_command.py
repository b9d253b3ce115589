"""`webhook`, and the exporter that sends events: as processes, to a real receiver."""

import json
from urllib.parse import urlsplit

import pytest

from forgekeeper.ledger.holds import Hold
from forgekeeper.ledger.operator_events import OperatorEvent
from tests.harness.ports import free_ports
from tests.harness.programs import Program, eventually
from tests.harness.receivers import answer_with, run_receiver

SECRET = "whsec_aHVudGVyMmh1bnRlcjJodW50ZXIyaHVudGVyMg=="


@pytest.fixture
def receiver():
    with run_receiver() as server:
        yield server


@pytest.fixture
def start_exporter(settings, tmp_path):
    """Start `forgekeeper exporter` with these settings, and kill it at the end."""
    started = []

    def start(port, **given):
        log = tmp_path / f"{port}.log"
        started.append(Program(log, "-m", "forgekeeper.cli", "exporter", METRICS_PORT_EXPORTER=port, **given))
        return started[-1]

    yield start
    for one in started:
        one.kill()


def test_a_test_event_reaches_the_receiver_without_any_server(main, receiver):
    result = main("webhook", "test", "--json", WEBHOOK_URL=receiver.url, WEBHOOK_SECRET=SECRET)

    (request,) = receiver.requests
    assert (result.status, result.json) == (0, {"id": request.headers["webhook-id"], "delivered": True})
    assert json.loads(request.body)["type"] == "webhook.test"


def test_a_receiver_that_refuses_the_test_event_is_a_failure(main, receiver):
    receiver.answer = answer_with(403)

    result = main("webhook", "test", WEBHOOK_URL=f"{receiver.url}/hunter2", WEBHOOK_SECRET=SECRET)

    assert result.status == 1
    assert result.complaint == "the event was not delivered: the receiver answered with status 403"


def test_without_a_webhook_the_test_says_which_settings_are_missing(main):
    result = main("webhook", "test")

    assert result.status == 2
    assert "set FORGEKEEPER_WEBHOOK_URL and FORGEKEEPER_WEBHOOK_SECRET" in result.complaint


def test_the_list_has_each_event_and_its_delivery(database, main):
    OperatorEvent.insert(kind="batch.held", batch="prune", subject="1", detail={"reason": "R"}).execute()

    (event,) = main("webhook", "list", "--json").json["events"]
    assert (event["kind"], event["batch"], event["detail"]) == ("batch.held", "prune", {"reason": "R"})
    assert "next attempt at" in main("webhook").stdout


def test_one_of_two_exporters_sends_a_hold_to_the_receiver(database, start_exporter, receiver):
    Hold.insert(batch="prune", kind="breaker", reason="R", by="test").execute()
    for port in free_ports(2):
        start_exporter(port, WEBHOOK_URL=receiver.url, WEBHOOK_SECRET=SECRET)

    eventually(lambda: OperatorEvent.select().where(OperatorEvent.delivered_at.is_null(False)).exists())
    assert [json.loads(one.body)["data"]["batch"] for one in receiver.requests] == ["prune"]


def test_an_exporter_with_its_own_grants_sends_an_event(
    *, main, own_database, new_role, query, start_exporter, receiver
):
    url = new_role(own_database)
    name = urlsplit(url).username
    assert main("grants", "--role", name, "--as", "exporter", DATABASE_URL=own_database).status == 0
    query(
        own_database, "insert into forgekeeper.holds (batch, kind, reason, by) values ('prune', 'breaker', 'R', 'me')"
    )

    exporter = start_exporter(*free_ports(1), DATABASE_URL=url, WEBHOOK_URL=receiver.url, WEBHOOK_SECRET=SECRET)

    eventually(lambda: exporter.said("event delivered"))
    events = [json.loads(one.body) for one in receiver.requests]
    # The sample data may have an objective at risk, too.
    assert [event["data"]["batch"] for event in events if event["type"] == "batch.held"] == ["prune"]
    assert exporter.said("events not watched") + exporter.said("backlog unknown") == []
