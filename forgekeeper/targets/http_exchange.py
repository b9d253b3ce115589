"""Send one HTTP request over its own connection.

It uses a proxy if the environment or the caller names one.  At a time limit asyncio ends the exchange at any step:
nothing is sent after that.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from email.parser import BytesParser
from functools import cached_property
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

MAX_ANSWER_BYTES = 8 << 20
"""Maximum bytes of an answer with a stated length; an answer about a thousand keys of S3 needs less than half."""


class HttpAnswer(NamedTuple):
    """An answer, whatever its status."""

    status: int
    headers: Message
    body: bytes


@dataclass(frozen=True)
class HttpServer:
    """A server, by a URL that leads to it; *proxy_url* overrides the environment."""

    url: SplitResult
    proxy_url: str = field(default="", repr=False)
    is_verified: bool = True

    async def exchange(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> HttpAnswer:
        """Send a request and return its answer; raise OSError or ValueError if that fails.

        Calls *meanwhile* between the two: the system receives the answer, and this process reads it afterwards.
        """
        reader, writer = await self._connect()
        if self._proxy and self.url.scheme == "http":
            target, headers = f"http://{self.url.netloc}{target}", {**headers, **self._proxy_credentials}
        try:
            headers = {**headers, "content-length": str(len(body)), "connection": "close"}
            # Wait until the system has the whole request: nothing is sent during *meanwhile*.
            writer.transport.set_write_buffer_limits(0)
            writer.write(_request_head(f"{method} {target}", headers) + body)
            await writer.drain()
            meanwhile()
            return await _read_answer(reader)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            raise ConnectionError("the answer is incomplete, or its headers are too long") from None
        finally:
            # Not closed: that would wait for the other side to end TLS.
            writer.transport.abort()

    @cached_property
    def _proxy(self) -> SplitResult | None:
        host, _port = _host_and_port(self.url)
        found = self.proxy_url or ("" if proxy_bypass(host) else getproxies().get(self.url.scheme, ""))
        return urlsplit(found if "//" in found else f"//{found}") if found else None

    @cached_property
    def _tls_context(self) -> ssl.SSLContext | None:
        if self.url.scheme == "http":
            return None
        context = ssl.create_default_context()
        if not self.is_verified:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context

    @property
    def _proxy_credentials(self) -> dict[str, str]:
        if self._proxy is None or self._proxy.username is None:
            return {}
        pair = f"{unquote(self._proxy.username)}:{unquote(self._proxy.password or '')}"
        return {"proxy-authorization": f"Basic {b64encode(pair.encode()).decode()}"}

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = _host_and_port(self.url)
        if self._proxy is None:
            return await asyncio.open_connection(host, port, ssl=self._tls_context)
        reader, writer = await asyncio.open_connection(*_host_and_port(self._proxy))
        if self._tls_context is not None:
            writer.write(_request_head(f"CONNECT {host}:{port}", {"host": f"{host}:{port}", **self._proxy_credentials}))
            status, _headers = await _read_head(reader)
            if status != 200:
                writer.transport.abort()
                raise ConnectionError(f"the proxy answered {status}")
            await writer.start_tls(self._tls_context, server_hostname=host)
        return reader, writer


def _host_and_port(url: SplitResult) -> tuple[str, int]:
    return url.hostname or "", url.port or (443 if url.scheme == "https" else 80)


def _request_head(first: str, headers: Mapping[str, str]) -> bytes:
    lines = (f"{first} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", "")
    return "\r\n".join(lines).encode("latin-1")


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, Message]:
    first, _, fields = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")
    if (found := re.match(rb"HTTP/1\.[01] ([0-9]{3})\b", first)) is None:
        raise ValueError(f"the answer is not HTTP: it begins with {first[:40]!r}")
    return int(found[1]), BytesParser().parsebytes(fields)


async def _read_answer(reader: asyncio.StreamReader) -> HttpAnswer:
    status, headers = await _read_head(reader)
    length = headers.get("content-length")
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = await _read_chunks(reader)
    elif length is not None:
        body = await _read_bytes(reader, int(length))
    else:
        body = await reader.read()
    return HttpAnswer(status, headers, body)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        body += await _read_bytes(reader, size, had=len(body))
        await reader.readuntil(b"\r\n")
    return body


async def _read_bytes(reader: asyncio.StreamReader, size: int, *, had: int = 0) -> bytes:
    if had + size > MAX_ANSWER_BYTES:
        raise ValueError(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
    return await reader.readexactly(size)
