"""A line to Redis that is kept from one command to the next while they come one after the other."""

from __future__ import annotations

import time
from typing import Any

import redis
from redis.connection import Connection

KEPT = 0.02
"""Seconds for which the line is used again without a look whether Redis has hung up; after a longer pause it is the
pool that looks, as before every other command."""


class Line(redis.Redis):
    """A client that one thread at a time may use, for what is asked with every message.

    It takes its connection of the pool's, which costs as much as the command itself, only after a pause; and has none
    of the pool's retries.  Worth 30 of a message's 230 microseconds in Python (`python -m benchmarks messages`).
    """

    def __init__(self, client: redis.Redis) -> None:
        super().__init__(connection_pool=client.connection_pool)
        self._kept: Connection | None = None
        self._used_at = 0.0

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send the command, and return what Redis says; after any error the connection is another one."""
        connection = self._connected()
        try:
            connection.send_command(*args)  # type: ignore[no-untyped-call]
            answer = self.parse_response(connection, args[0], **options)  # type: ignore[no-untyped-call]
        except BaseException:
            self._kept = None
            connection.disconnect()  # type: ignore[no-untyped-call]
            self.connection_pool.release(connection)
            raise
        self._used_at = time.monotonic()
        return answer

    def _connected(self) -> Connection:
        kept = self._kept
        if kept is None or time.monotonic() > self._used_at + KEPT:
            self._kept = None
            if kept is not None:
                self.connection_pool.release(kept)
            self._kept = kept = self.connection_pool.get_connection()
        return kept
