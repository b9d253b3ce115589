"""Send S3 requests that the store's client cannot send, or whose answers it hides.

Requests are signed here (AWS Signature Version 4) with the keys of the store's URL or of the environment.  If the
client fetches its credentials from the machine, only the client knows them, and nothing here is sent to that store.
"""

from __future__ import annotations

import asyncio
import hmac
from base64 import b64encode
from collections.abc import Callable, Mapping
from datetime import timedelta
from hashlib import md5, sha256
from urllib.parse import SplitResult, parse_qs, quote, urlsplit
from xml.etree import ElementTree as ET

import obstore
from obstore.store import S3Store

from forgekeeper.platform.settings.addresses import FALSE_VALUES, read_s3_option
from forgekeeper.targets.http_exchange import HttpAnswer, HttpServer
from forgekeeper.targets.store_urls import split_url

MAX_SEND_ATTEMPTS = 3
"""Maximum sendings of one request, while the store says that it cannot answer at present."""
FIRST_PAUSE_SECONDS = 0.1
"""Pause before a request is sent again; doubled each time."""
SIGNATURE_ALGORITHM = "AWS4-HMAC-SHA256"
TEMPORARY_STATUSES = frozenset({408, 429, 500, 502, 503, 504})

Element = ET.Element


class S3Refused(OSError):
    """The store has answered with an error; the message is its status and code."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.is_temporary = status in TEMPORARY_STATUSES
        super().__init__(f"{status} {_error_code(body)}".strip())


class S3Requests:
    """A sender of requests to one bucket; threads may share it.

    It holds keys, and must not be logged.  A request without an answer within *timeout* has failed.
    """

    def __init__(self, store: S3Store, options: Mapping[str, str], timeout: timedelta) -> None:
        self.prefix = f"{store.prefix}/" if store.prefix else ""
        """The beginning of every key that belongs to the store."""
        self._store = store
        self._secret = read_s3_option(options, "secret_access_key")
        self._timeout = timeout.total_seconds()
        url = self._signed_url()
        self._bucket = url.path.rsplit("/", self.prefix.count("/") + 1)[0]
        is_verified = read_s3_option(options, "allow_invalid_certificates").lower() in FALSE_VALUES
        place = url._replace(path="", query="")
        self._server = HttpServer(place, options.get("proxy_url", ""), is_verified=is_verified)

    @property
    def key_id(self) -> str:
        """The id of the keys that the client uses; their secret has to be ours."""
        return _signature_of(self._signed_url())["X-Amz-Credential"].partition("/")[0]

    async def send(
        self,
        method: str,
        query: Mapping[str, str | None],
        *,
        key: str = "",
        body: bytes = b"",
        meanwhile: Callable[[], None] = lambda: None,
    ) -> HttpAnswer:
        """Send a request to the bucket, or to the object of *key*; return a successful answer.

        Calls *meanwhile* before it reads an answer, each time that it sends the request.
        Raises `S3Refused` for an error, and OSError or ValueError if no answer can be read.
        """
        path = f"{self._bucket}/{quote(key, safe='/-_.~')}" if key or not self._bucket else self._bucket
        pairs = (name if value is None else f"{name}={quote(value, safe='-_.~')}" for name, value in query.items())
        target = f"{path}?{'&'.join(pairs)}"
        for sending in range(1, MAX_SEND_ATTEMPTS):
            try:
                return await self._send_once(method, target, body, meanwhile)
            except S3Refused as refused:
                if not refused.is_temporary:
                    raise
            except ConnectionError:
                pass
            await asyncio.sleep(FIRST_PAUSE_SECONDS * 2 ** (sending - 1))
        return await self._send_once(method, target, body, meanwhile)

    async def _send_once(self, method: str, target: str, body: bytes, meanwhile: Callable[[], None]) -> HttpAnswer:
        headers = self._signed_headers(method, target, body)
        async with asyncio.timeout(self._timeout):
            answer = await self._server.exchange(method, target, headers, body, meanwhile)
        if answer.status >= 300:
            raise S3Refused(answer.status, answer.body)
        return answer

    def _signed_url(self) -> SplitResult:
        """Return a URL that the client has signed with the store's URL and the environment."""
        return urlsplit(obstore.sign(self._store, "GET", "x", timedelta(minutes=1)))

    def _signed_headers(self, method: str, target: str, body: bytes) -> dict[str, str]:
        """Return the headers of a request.

        "Authenticating Requests" in Amazon's reference of S3 names each step.
        """
        signature = _signature_of(self._signed_url())
        token = signature.get("X-Amz-Security-Token")
        headers = {
            # Amazon requires this header for bulk deletions, and allows it for other requests.
            "content-md5": b64encode(md5(body, usedforsecurity=False).digest()).decode(),
            "host": self._server.url.netloc,
            "x-amz-content-sha256": sha256(body).hexdigest(),
            "x-amz-date": signature["X-Amz-Date"],
            **({"x-amz-security-token": token} if token else {}),
        }
        path, _, query = target.partition("?")
        pairs = sorted(pair if "=" in pair else f"{pair}=" for pair in query.split("&"))
        names, written = ";".join(headers), "".join(f"{name}:{value}\n" for name, value in headers.items())
        canonical = "\n".join((method, path, "&".join(pairs), written, names, headers["x-amz-content-sha256"]))
        _key_id, scope = signature["X-Amz-Credential"].split("/", 1)
        to_sign = "\n".join((SIGNATURE_ALGORITHM, headers["x-amz-date"], scope, sha256(canonical.encode()).hexdigest()))
        key = f"AWS4{self._secret}".encode()
        for part in (*scope.split("/"), to_sign):
            key = hmac.digest(key, part.encode(), "sha256")
        proof = f"Credential={signature['X-Amz-Credential']}, SignedHeaders={names}, Signature={key.hex()}"
        return headers | {"authorization": f"{SIGNATURE_ALGORITHM} {proof}"}


def requests_to(store: object, url: str, *, timeout: timedelta) -> S3Requests | None:
    """Return a sender of requests to the bucket behind *url*; None if it cannot sign them.

    *store* is the opened client.
    """
    _address, options = split_url(url)
    key_id, secret = read_s3_option(options, "access_key_id"), read_s3_option(options, "secret_access_key")
    is_signed = read_s3_option(options, "skip_signature").lower() in FALSE_VALUES
    if not (isinstance(store, S3Store) and key_id and secret and is_signed):
        return None
    requests = S3Requests(store, options, timeout)
    return requests if requests.key_id == key_id else None


def is_refusal(error: Exception) -> bool:
    """Return whether the store is likely to answer the same request in the same way for hours."""
    return not error.is_temporary if isinstance(error, S3Refused) else not isinstance(error, OSError)


def parse_xml(body: bytes, root: str) -> Element:
    """Return an answer's root element without namespaces; raise ValueError for another name."""
    if b"<!DOCTYPE" in body:
        raise ValueError("the answer is not from S3: it has a document type")
    try:
        found = ET.fromstring(body)  # noqa: S314, nothing can expand without a declaration
    except ET.ParseError:
        raise ValueError(f"the answer is not XML: it begins with {body[:40]!r}") from None
    for element in found.iter():
        element.tag = element.tag.rpartition("}")[2]
    if found.tag != root:
        raise ValueError(f"the answer is not a {root}, but {found.tag} {found.findtext('Code', '')}".strip())
    return found


def _signature_of(url: SplitResult) -> dict[str, str]:
    """Return the query of a signed URL: its keys, region and time."""
    return {name: values[0] for name, values in parse_qs(url.query).items()}


def _error_code(body: bytes) -> str:
    try:
        return parse_xml(body, "Error").findtext("Code", "")
    except ValueError:
        return ""
