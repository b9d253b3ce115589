"""URLs of a Redis whose master Sentinels name: ``redis+sentinel://user:password@host:26379,host/MASTER/0``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from redis.connection import parse_url

SENTINEL_SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
"""Scheme of the connections to the Sentinels and to Redis, by the scheme of the URL."""
DEFAULT_SENTINEL_PORT = 26379
SENTINEL_OPTIONS = {"sentinel_username": "username", "sentinel_password": "password"}
"""Options of the URL for the Sentinels, which may have other users than Redis, and their names in redis-py."""
SHARED_PREFIX = "ssl_"
"""Beginning of the names of options that are for the Sentinels, too."""
HOST_PATTERN = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[\w.-]+)(?::(?P<port>\d+))?")
URL_PATTERN = re.compile(
    r"[a-z+]+://(?:(?P<user>[^/?#]*)@)?(?P<hosts>[^/?#@]+)"
    r"/(?P<master>[\w.-]+)(?:/(?P<db>\d+))?(?:\?(?P<query>[^#]*))?"
)


class SentinelUrlError(ValueError):
    """A part of the URL is missing or malformed; the message does not repeat the URL."""


@dataclass(frozen=True)
class SentinelUrl:
    """The parts of a URL.

    *sentinels* has hosts and ports, *master* the name of the master.  *redis_url* is the URL of a single Redis with the
    URL's other parts, of which the host and the port are not used.  *sentinel_options* are options of redis-py.
    """

    sentinels: list[tuple[str, int]]
    master: str
    redis_url: str
    sentinel_options: dict[str, Any]

    @classmethod
    def parse(cls, url: str) -> SentinelUrl | None:
        """Parse a URL; None if its scheme is another.  Raises `SentinelUrlError`, and `ValueError` of the query."""
        given = url.partition("://")[0]
        if (scheme := SENTINEL_SCHEMES.get(given)) is None:
            return None
        # Not by `urlsplit`: Debian's Python refuses several hosts if one is in brackets.
        parts = URL_PATTERN.fullmatch(url)
        hosts = parts["hosts"].split(",") if parts else []
        found = [HOST_PATTERN.fullmatch(host) for host in hosts]
        if parts is None or None in found:
            raise SentinelUrlError(f"not a URL such as {given}://host1:26379,host2:26379/MASTER/0")
        query, user = parts["query"] or "", f"{parts['user']}@" if parts["user"] else ""
        options = dict(parse_qsl(query, strict_parsing=bool(query)))
        own = {name: options.pop(name) for name in SENTINEL_OPTIONS if name in options}
        redis_url = f"{scheme}://{user}{hosts[0]}/{parts['db'] or 0}?{urlencode(options)}"
        shared = {
            name: value
            for name, value in parse_url(redis_url).items()  # type: ignore[no-untyped-call]
            if name.startswith(SHARED_PREFIX)
        }
        return cls(
            [(one["host"].strip("[]"), int(one["port"] or DEFAULT_SENTINEL_PORT)) for one in found if one],
            parts["master"],
            redis_url,
            {SENTINEL_OPTIONS[name]: value for name, value in own.items()}
            | shared
            | ({"ssl": True} if scheme == "rediss" else {}),
        )

    def show(self) -> str:
        """Return the URL for display, without secrets."""
        at = parse_url(self.redis_url)  # type: ignore[no-untyped-call]
        scheme = urlsplit(self.redis_url).scheme
        hosts = ",".join(f"{host}:{port}" for host, port in self.sentinels)
        return f"{scheme}+sentinel://{hosts}/{self.master}/{at.get('db', 0)}"
