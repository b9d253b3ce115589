"""Requests to the operators' webhook, signed as `Standard Webhooks <https://www.standardwebhooks.com>`_ describes.

Receivers in many languages have a library that verifies the signature.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from concurrent.futures import Future
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    UnknownHandler,
)

import orjson
from dramatiq.common import current_millis

from forgekeeper.platform.settings import Settings
from forgekeeper.platform.settings.addresses import WEBHOOK_SECRET_PREFIX
from metrics.logs import clean_text, text_of
from metrics.threads import DaemonThread

DELIVERY_TIMEOUT_SECONDS = 10.0
"""Time limit in seconds of a request, with its connection and the lookup of its host."""


class WebhookError(Exception):
    """The receiver did not accept an event; the message has the reason, without the URL."""


class WebhookEvent(NamedTuple):
    """An event as receivers see it; *id* is equal in each delivery of the event, *at* an ISO 8601 time."""

    id: str
    kind: str
    at: str
    data: dict[str, Any]

    def build_body(self) -> bytes:
        """Return the body, in the structure that Standard Webhooks recommends."""
        return orjson.dumps({"type": self.kind, "timestamp": self.at, "data": self.data})


class _NoRedirects(HTTPRedirectHandler):
    """A redirect is an error: it could lead the event to a server that nobody has configured."""

    def redirect_request(self, *_redirect: object) -> None:
        return None


class Webhook:
    """The receiver of events; used by one thread."""

    def __init__(self, url: str, secret: str) -> None:
        self._url = url
        self._key = base64.b64decode(secret.removeprefix(WEBHOOK_SECRET_PREFIX))
        self._sending: DaemonThread | None = None
        self._opener = OpenerDirector()
        # Handlers of http and https only: no file, FTP or data.
        for handler in (ProxyHandler, HTTPHandler, HTTPSHandler, _NoRedirects, HTTPErrorProcessor, UnknownHandler):
            self._opener.add_handler(handler())
        self._opener.add_handler(HTTPDefaultErrorHandler())

    @classmethod
    def from_settings(cls, settings: Settings) -> Webhook | None:
        """Return the webhook of the settings, None without one."""
        if settings.webhook_url is None or settings.webhook_secret is None:
            return None
        return cls(settings.webhook_url.get_secret_value(), settings.webhook_secret.get_secret_value())

    def send_event(self, event: WebhookEvent) -> None:
        """Send the event once; raise `WebhookError` unless the receiver answers with a status of 200 to 299.

        Returns or raises within `DELIVERY_TIMEOUT_SECONDS`, even if the receiver sends one byte at a time.
        """
        if self._sending is not None and self._sending.is_alive():
            raise WebhookError("an earlier request has not ended")
        request = self._build_request(event.id, current_millis() // 1000, event.build_body())
        answer: Future[None] = Future()

        def send_request() -> None:
            try:
                with self._opener.open(request, timeout=DELIVERY_TIMEOUT_SECONDS):
                    answer.set_result(None)
            except BaseException as error:  # noqa: BLE001, the thread that waits raises it
                answer.set_exception(error)

        self._sending = DaemonThread(send_request, "webhook request")
        self._sending.start()
        try:
            answer.result(DELIVERY_TIMEOUT_SECONDS)
        except HTTPError as error:
            error.close()
            raise WebhookError(f"the receiver answered with status {error.code}") from None
        except TimeoutError:
            raise WebhookError(f"the receiver did not answer within {DELIVERY_TIMEOUT_SECONDS:g} s") from None
        except Exception as error:  # noqa: BLE001, one event must not end the process
            raise WebhookError(_describe_failure(error)) from None

    def _build_request(self, event_id: str, timestamp: int, body: bytes) -> Request:
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "forgekeeper",
            "webhook-id": event_id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": sign_event(self._key, event_id, timestamp, body),
        }
        return Request(self._url, body, headers, method="POST")  # noqa: S310, the opener knows http and https only


def sign_event(key: bytes, event_id: str, timestamp: int, body: bytes) -> str:
    """Return the signature: HMAC-SHA256 of the id, the time in seconds since 1970, and the body."""
    signed = hmac.digest(key, f"{event_id}.{timestamp}.".encode() + body, hashlib.sha256)
    return f"v1,{base64.b64encode(signed).decode()}"


def _describe_failure(error: Exception) -> str:
    reason = error.reason if isinstance(error, URLError) else error
    if isinstance(reason, TimeoutError):
        return f"the receiver did not answer within {DELIVERY_TIMEOUT_SECONDS:g} s"
    # Other errors than the operating system's may repeat a part of the URL.
    shown = text_of(reason) if isinstance(reason, OSError) else ""
    return f"the receiver cannot be reached: {clean_text(shown or type(error).__name__)}"
