"""A real PostgreSQL and a real Redis, for the demo, development, tests and benchmarks.

Both come from wheels, listen on unix sockets only, and end with the process that started them, by whatever signal.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from demo.servers.machine import BUNDLED, EmbeddedError, Programs, bundled_redis, programs
from demo.servers.server import Server, Site, not_started, opened, spawn

__all__ = ["EmbeddedError", "Servers", "servers"]

PORT = "5432"  # a part of the socket's name
# UTF-8 text in code point order: the same order on every machine, whatever locales it has.
INITDB_OPTIONS = (
    "--username=forgekeeper",
    "--auth=trust",
    "--encoding=UTF8",
    "--locale=C",
    "--locale-provider=builtin",
    "--builtin-locale=C.UTF-8",
    "--no-instructions",
)
SETTINGS = {
    "max_connections": "100",
    "shared_buffers": "128MB",
    "timezone": "UTC",
    "log_timezone": "UTC",
    # For psql: forgekeeper itself looks nowhere else anyhow.
    "search_path": "forgekeeper, public",
    # The default keeps shared memory in /dev/shm, where a killed server would leave it.
    "dynamic_shared_memory_type": "mmap",
}
# What is removed in the end need not survive a power failure.
TEMPORARY_SETTINGS = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


@dataclass(frozen=True)
class Servers:
    """Addresses and process ids of the running servers; *warning* is a sentence for people, or None."""

    folder: Path
    database_url: str
    redis_url: str
    postgres_pid: int
    redis_pid: int
    warning: str | None = None


@contextmanager
def servers(
    folder: Path | None = None, *, postgres_options: Mapping[str, str] | None = None, redis: str | None = None
) -> Iterator[Servers]:
    """Run PostgreSQL, with an empty database `forgekeeper`, and Redis while the context lasts.

    Without *folder* everything is in a temporary one that is removed in the end, and durability is traded for speed.
    With *folder* the data stays for the next start; a folder that is in use is refused.  *postgres_options* are server
    settings such as `fsync`.  *redis* is the program of its server; by default a server on the PATH, else the bundled
    one.
    """
    with ExitStack() as stack:
        yield _started(stack, folder, postgres_options or {}, redis)


def _started(stack: ExitStack, folder: Path | None, options: Mapping[str, str], program: str | None) -> Servers:
    found = programs(program)
    try:
        site = stack.enter_context(opened(folder))
        redis = _start_redis(site, found.redis)
        stack.callback(redis.stop)
        postgres = start_postgres(site, found, options)
        stack.callback(postgres.stop)
        redis.wait_until_ready()
        postgres.wait_until_ready()
    except OSError as error:
        raise EmbeddedError(str(error)) from error
    # The servers hold it; a process that we fork must not.
    site.lock.close()
    urls = database_url(site), redis_url(site)
    warning = BUNDLED if found.redis == bundled_redis() else None
    return Servers(site.folder, *urls, postgres.process.pid, redis.process.pid, warning)


def database_url(site: Site) -> str:
    """Return the URI that libpq accepts; with the port, as libpq would take the one in PGPORT."""
    return f"postgresql://forgekeeper@/forgekeeper?host={quote(os.fsencode(site.sockets))}&port={PORT}"


def redis_url(site: Site) -> str:
    """Return what `redis.Redis.from_url` accepts."""
    return f"unix://{quote(os.fsencode(site.sockets / 'redis.sock'))}?db=0"


def _start_redis(site: Site, binary: str) -> Server:
    """Start Redis, without waiting for it; a lasting one loses at most the last second when it is killed."""
    data, log = site.folder / "redis", site.folder / "redis.log"
    data.mkdir(mode=0o700, exist_ok=True)
    settings = {
        "port": "0",
        "unixsocket": str(site.sockets / "redis.sock"),
        "unixsocketperm": "700",
        "dir": str(data),
        "save": "",
        "appendonly": "no" if site.temporary else "yes",
    }
    arguments = [word for name, value in settings.items() for word in (f"--{name}", value)]
    process = spawn([binary, *arguments], site, log=log, dies_by=signal.SIGTERM)
    return Server("Redis", process, log, signal.SIGTERM)


def start_postgres(site: Site, programs: Programs, options: Mapping[str, str]) -> Server:
    """Start PostgreSQL, without waiting for it; make the database first where there is none."""
    data, log = site.folder / "postgres", site.folder / "postgres.log"
    settings = SETTINGS | (TEMPORARY_SETTINGS if site.temporary else {})
    if not data.exists():
        _create(data, settings, site, programs, log)
    # We hold the folder's lock, so no server runs here: this file is a killed one's, and would prevent the start
    # where another process has its number now.
    (data / "postmaster.pid").unlink(missing_ok=True)
    quoted = str(site.sockets).replace('"', '""')
    listening = {
        "listen_addresses": "",
        "port": PORT,
        "unix_socket_directories": f'"{quoted}"',
        "unix_socket_permissions": "0700",
    }
    command = [f"{programs.postgres}/postgres", "-D", str(data), *_flags({**settings, **options, **listening})]
    process = spawn(command, site, log=log, prefix=programs.prefix, dies_by=signal.SIGINT)
    return Server("PostgreSQL", process, log, signal.SIGINT)


def _create(data: Path, settings: Mapping[str, str], site: Site, programs: Programs, log: Path) -> None:
    """Make the data folder under another name, so that one with the right name is complete."""
    unfinished = data.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    if programs.owner is not None:
        os.chown(unfinished, programs.owner, -1)
    where = ["-D", str(unfinished)]
    unsynced = ["--no-sync"] if site.temporary else []
    flags = _flags({**settings, "exit_on_error": "on"})
    for (program, *arguments), given in (
        (["initdb", *where, *INITDB_OPTIONS, *unsynced], b""),
        (["postgres", "--single", *where, *flags, "postgres"], b"CREATE DATABASE forgekeeper\n"),
    ):
        command = [f"{programs.postgres}/{program}", *arguments]
        process = spawn(command, site, log=log, prefix=programs.prefix, dies_by=signal.SIGKILL, stdin=subprocess.PIPE)
        process.communicate(given)
        if process.returncode != 0:
            raise not_started("PostgreSQL", log)
    unfinished.rename(data)


def _flags(settings: Mapping[str, str]) -> list[str]:
    return [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
