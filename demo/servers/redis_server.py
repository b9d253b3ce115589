"""Run Redis in a folder."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from urllib.parse import quote

from demo.servers.folder import Site
from demo.servers.server import Server, spawn


def start(site: Site, binary: str) -> Server:
    """Start Redis, without waiting for it; a lasting one loses at most the last second when it is killed."""
    data, log = site.folder / "redis", site.folder / "redis.log"
    data.mkdir(mode=0o700, exist_ok=True)
    settings = {
        "port": "0",
        "unixsocket": str(_socket(site)),
        "unixsocketperm": "700",
        "dir": str(data),
        "save": "",
        "appendonly": "no" if site.temporary else "yes",
    }
    arguments = [word for name, value in settings.items() for word in (f"--{name}", value)]
    process = spawn([binary, *arguments], site, log=log, dies_by=signal.SIGTERM)
    return Server("Redis", process, log, signal.SIGTERM)


def url(site: Site) -> str:
    """Return what `redis.Redis.from_url` accepts."""
    return f"unix://{quote(os.fsencode(_socket(site)))}?db=0"


def _socket(site: Site) -> Path:
    return site.sockets / "redis.sock"
