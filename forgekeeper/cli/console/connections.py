"""Limits of connections: time per request, connections per address and in all.

Uvicorn has neither limit: incomplete requests would hold connections until no file descriptor is left for others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from functools import partial
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 10
"""Time limit for a whole request, including its body."""
MAX_CONNECTIONS = 400
"""Maximum open connections; each needs a file descriptor."""
MAX_CONNECTIONS_PER_ADDRESS = 100
"""Maximum connections of an address that is not a known proxy. A browser opens six."""


class OpenConnections:
    """Open connections, counted by address."""

    def __init__(self, proxies: tuple[IPv4Network | IPv6Network, ...]) -> None:
        self._proxies = proxies
        self._open: Counter[str] = Counter()

    def protocol_class(self) -> type[asyncio.Protocol]:
        """Return uvicorn's protocol class for connections."""
        return partial(LimitedProtocol, connections=self)  # type: ignore[return-value]  # uvicorn only calls it

    def add(self, address: str) -> bool:
        """Count a connection; return whether it may stay."""
        self._open[address] += 1
        if self._open.total() > MAX_CONNECTIONS:
            return False
        return self._open[address] <= MAX_CONNECTIONS_PER_ADDRESS or self._is_proxy(address)

    def remove(self, address: str) -> None:
        """Forget a connection that has ended."""
        self._open[address] -= 1
        self._open = +self._open

    def _is_proxy(self, address: str) -> bool:
        with suppress(ValueError):
            return any(ip_address(address) in network for network in self._proxies)
        return False


class LimitedProtocol(H11Protocol):
    """A connection that is closed if its request is late or there are too many connections."""

    def __init__(self, *arguments: Any, connections: OpenConnections, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._connections = connections
        self._address = ""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Start the timer, or close the connection at once if there are too many."""
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        if self._connections.add(self._address):
            self._begin_timer()
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer and forget the connection."""
        self._stop_timer()
        self._connections.remove(self._address)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Receive a part of a request; stop the timer once the request is complete."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE and self.conn.their_state is not h11.SEND_BODY:
            self._stop_timer()

    def on_response_complete(self) -> None:
        """Start the timer for the next request."""
        super().on_response_complete()
        self._begin_timer()

    def _begin_timer(self) -> None:
        self._stop_timer()
        if not self.transport.is_closing():
            self._timer = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
