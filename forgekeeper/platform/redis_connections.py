"""Connections to Redis: to one server, or to the master that Sentinels name."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import redis
from redis.connection import parse_url

from forgekeeper.platform.settings.sentinel_url import SentinelUrl

UNSUITABLE_MODES = {
    "cluster": "this is a node of a Redis Cluster, which distributes keys that must be changed together: name a single"
    " Redis, or Sentinels (redis+sentinel://), in FORGEKEEPER_REDIS_URL",
    "sentinel": "this is a Sentinel, not a Redis: write redis+sentinel://HOST:PORT/MASTER/0 into FORGEKEEPER_REDIS_URL",
}
"""Sentences about the modes of a server, in its answer to ``HELLO``, that we cannot use."""


class UnsuitableRedis(redis.ConnectionError):
    """The server is a node of a Cluster or a Sentinel; the message is a sentence with the remedy."""


class IdleConnections(redis.ConnectionPool):
    """The connections to Redis that no thread uses now; a thread that finds none opens one.

    There are never more connections than threads, so nothing limits, counts or locks them.
    """

    def get_connection(self, command_name: Any = None, *keys: Any, **options: Any) -> Any:  # noqa: ARG002, Redis's
        """Return a connection that the server has not closed, as far as this machine knows.

        Raises `redis.ConnectionError`, and `UnsuitableRedis` if the server is a part of a Cluster or a Sentinel.
        """
        # After a fork, the parent's connections are forgotten.
        self._checkpid()
        # `pop` and `append` are atomic.
        with suppress(IndexError, redis.ConnectionError, OSError):
            found = self._available_connections.pop()
            if not found.can_read():
                return found
        made: Any = self.connection_class(**self.connection_kwargs | self.locate_server())
        made.connect()
        _require_suitable(made)
        return made

    def locate_server(self) -> dict[str, Any]:
        """Return the place of the server, as options of redis-py, if the options of the pool do not name it."""
        return {}

    def release(self, connection: Any) -> None:
        """Keep the connection for the next command, unless it was closed."""
        if connection.is_connected:
            self._available_connections.append(connection)


class MasterConnections(IdleConnections):
    """Connections to the master that Sentinels name at the moment when a connection is opened.

    After a failover the Sentinels let the old master close its connections.  If it does not answer, a command ends with
    a timeout, and its connection is closed.
    """

    def __init__(self, url: SentinelUrl, **options: Any) -> None:
        place = parse_url(url.redis_url)  # type: ignore[no-untyped-call]
        super().__init__(**options | place)
        self._sentinels = [redis.Redis(host, port, **options | url.sentinel_options) for host, port in url.sentinels]
        self._master = url.master

    def locate_server(self) -> dict[str, Any]:
        """Ask one Sentinel after another for the master.

        Raises `redis.ConnectionError` with the reason of each Sentinel if none knows a living master.
        """
        # redis-py's own search hides the reasons, and two threads that reorder its list at once lose a Sentinel.
        reasons = []
        for sentinel in self._sentinels:
            try:
                state: Any = sentinel.sentinel_master(self._master)
            except redis.RedisError as error:
                reasons.append(str(error).rstrip("."))
                continue
            if state["is_master"] and not state["is_sdown"] and not state["is_odown"]:
                self._sentinels = sorted(self._sentinels, key=lambda other: other is not sentinel)
                return {"host": state["ip"], "port": state["port"]}
            reasons.append("a Sentinel sees the master down")
        raise redis.ConnectionError(f"no Sentinel names a living {self._master}: {'; '.join(dict.fromkeys(reasons))}")


def open_connections(url: str, **options: Any) -> IdleConnections:
    """Return the connections to the Redis at *url*, with *options* of redis-py; nothing connects yet."""
    if (sentinel := SentinelUrl.parse(url)) is not None:
        return MasterConnections(sentinel, **options)
    return IdleConnections.from_url(url, **options)


def _require_suitable(connection: Any) -> None:
    """Raise `UnsuitableRedis` and close the connection if the server cannot be used."""
    said = connection.handshake_metadata or {}
    mode = said.get("mode", said.get(b"mode", ""))
    name = mode.decode() if isinstance(mode, bytes) else mode
    if (sentence := UNSUITABLE_MODES.get(name)) is not None:
        connection.disconnect()
        raise UnsuitableRedis(sentence)
