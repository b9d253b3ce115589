"""Run Redis in a site."""

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from forgekeeper.embedded.folder import Site
from forgekeeper.embedded.server import Server, spawn

ANSWER_PATIENCE = 1.0


def start(site: Site, binary: Path) -> Server:
    """Start Redis; return without waiting for it.

    A persistent site keeps an append-only file, so a kill loses at most the last second.
    """
    data = site.folder / "redis"
    data.mkdir(mode=0o700, exist_ok=True)
    log = site.folder / "redis.log"
    log.unlink(missing_ok=True)
    settings = {
        "port": "0",
        "unixsocket": str(_socket_path(site)),
        "unixsocketperm": "700",
        "dir": str(data),
        "save": "",
        "appendonly": "no" if site.temporary else "yes",
        "daemonize": "no",
    }
    arguments = [word for name, value in settings.items() for word in (f"--{name}", value)]
    process = spawn([str(binary), *arguments], site, log=log, dies_by=signal.SIGTERM)
    return Server("Redis", process, log, (signal.SIGTERM, signal.SIGKILL))


def url(site: Site) -> str:
    """Return what `redis.Redis.from_url` accepts."""
    return f"unix://{quote(os.fsencode(_socket_path(site)))}?db=0"


def answers(site: Site) -> Callable[[], bool]:
    """Return the question whether the server has its data loaded and takes commands."""
    return lambda: _pongs(str(_socket_path(site)))


def _socket_path(site: Site) -> Path:
    return site.sockets / "redis.sock"


def _pongs(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_PATIENCE)
        try:
            connection.connect(path)
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False
