"""The webhook: what a receiver can verify, and what no request does."""

import base64
import hashlib
import hmac
import json
import time

import pytest

from forgekeeper.platform import webhook as sending
from forgekeeper.platform.webhook import Webhook, WebhookError, WebhookEvent
from tests.harness.ports import free_ports
from tests.harness.receivers import answer_byte_by_byte, answer_never, answer_with, run_receiver
from tests.harness.settings import settings_with
from tests.harness.waiting import scale_timeout

KEY = b"a key of at least 24 bytes"
SECRET = "whsec_" + base64.b64encode(KEY).decode()
EVENT = WebhookEvent("0b8a", "batch.held", "2026-11-29T12:00:00+00:00", {"batch": "prune"})


@pytest.fixture
def receiver():
    with run_receiver() as server:
        yield server


def send(url):
    Webhook(url, SECRET).send_event(EVENT)


def test_a_receiver_verifies_the_signature_of_id_time_and_body(receiver):
    send(f"{receiver.url}/hooks?token=t")

    (request,) = receiver.requests
    signed = f"{request.headers['webhook-id']}.{request.headers['webhook-timestamp']}.".encode() + request.body
    expected = base64.b64encode(hmac.new(KEY, signed, hashlib.sha256).digest()).decode()
    assert request.path == "/hooks?token=t"
    assert request.headers["webhook-signature"] == f"v1,{expected}"


def test_an_event_has_its_id_its_time_and_its_facts(receiver):
    began = int(time.time())
    send(receiver.url)

    (request,) = receiver.requests
    assert request.headers["webhook-id"] == EVENT.id
    assert began <= int(request.headers["webhook-timestamp"]) <= time.time() + 1
    assert json.loads(request.body) == {"type": EVENT.kind, "timestamp": EVENT.at, "data": {"batch": "prune"}}


@pytest.mark.parametrize("status", [400, 404, 410, 429, 500, 503])
def test_a_receiver_that_refuses_is_an_error_with_its_status(receiver, status):
    receiver.answer = answer_with(status)

    with pytest.raises(WebhookError, match=f"^the receiver answered with status {status}$"):
        send(receiver.url)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(receiver, status):
    with run_receiver() as other:
        receiver.answer = answer_with(status, Location=other.url)

        with pytest.raises(WebhookError, match=f"status {status}"):
            send(receiver.url)

        assert other.requests == []


@pytest.mark.parametrize("answer", [answer_never, answer_byte_by_byte])
def test_a_receiver_that_does_not_finish_its_answer_costs_no_more_than_the_time_limit(receiver, monkeypatch, answer):
    monkeypatch.setattr(sending, "DELIVERY_TIMEOUT_SECONDS", 0.5)
    receiver.answer = answer
    began = time.monotonic()

    with pytest.raises(WebhookError, match=r"^the receiver did not answer within 0\.5 s$"):
        send(receiver.url)

    assert time.monotonic() - began < scale_timeout(2)


def test_a_request_that_still_hangs_is_not_joined_by_a_second(receiver, monkeypatch):
    monkeypatch.setattr(sending, "DELIVERY_TIMEOUT_SECONDS", 0.5)
    receiver.answer = answer_byte_by_byte
    webhook = Webhook(receiver.url, SECRET)
    with pytest.raises(WebhookError):
        webhook.send_event(EVENT)

    with pytest.raises(WebhookError, match="an earlier request has not ended"):
        webhook.send_event(EVENT)

    assert len(receiver.requests) == 1


def test_a_receiver_that_is_away_is_an_error_without_the_url(receiver):
    with pytest.raises(WebhookError, match=r"cannot be reached: .*Connection refused") as refusal:
        send(f"http://127.0.0.1:{free_ports(1)[0]}/hunter2")

    assert "hunter2" not in str(refusal.value)


def test_a_host_that_cannot_exist_is_an_error_of_the_webhook():
    with pytest.raises(WebhookError, match=r"^the receiver cannot be reached: Unicode(Encode)?Error$"):
        send("http://a..b/hunter2")


def test_an_answer_that_is_no_http_is_an_error_of_the_webhook(receiver):
    receiver.answer = lambda handler: handler.wfile.write(b"220 mail ready\r\n\r\n")

    with pytest.raises(WebhookError, match=r"^the receiver cannot be reached: BadStatusLine$"):
        send(receiver.url)


def test_a_url_that_is_no_http_is_not_requested(tmp_path):
    (tmp_path / "file").write_text("x")

    with pytest.raises(WebhookError):
        send((tmp_path / "file").as_uri())


def test_without_the_settings_there_is_no_webhook():
    assert Webhook.from_settings(settings_with()) is None
