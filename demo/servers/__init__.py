"""A real PostgreSQL and a real Redis, for the demo, development, tests and benchmarks.

Both come from wheels, listen on unix sockets only, and end with the process that started them, even if it is killed.
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

from demo.servers.machine import BUNDLED_REDIS_WARNING, EmbeddedError, Programs, find_bundled_redis, find_programs
from demo.servers.server import EmbeddedServer, ServerFolders, create_start_error, open_folders, start_program

__all__ = ["EmbeddedError", "Servers", "run_servers"]

POSTGRES_PORT = "5432"  # a part of the socket's name
# UTF-8 text in code point order: the order is equal on every machine, whatever locales it has.
INITDB_OPTIONS = (
    "--username=forgekeeper",
    "--auth=trust",
    "--encoding=UTF8",
    "--locale=C",
    "--locale-provider=builtin",
    "--builtin-locale=C.UTF-8",
    "--no-instructions",
)
POSTGRES_SETTINGS = {
    "max_connections": "100",
    "shared_buffers": "128MB",
    "timezone": "UTC",
    "log_timezone": "UTC",
    # For psql: forgekeeper sets its own search_path.
    "search_path": "forgekeeper, public",
    # The default keeps shared memory in /dev/shm, and a killed server would leave it there.
    "dynamic_shared_memory_type": "mmap",
}
# Temporary data need not survive a power failure.
TEMPORARY_SETTINGS = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


@dataclass(frozen=True)
class Servers:
    """Addresses and process ids of the running servers; *warning* is a sentence or None."""

    folder: Path
    database_url: str
    redis_url: str
    postgres_pid: int
    redis_pid: int
    warning: str | None = None


@contextmanager
def run_servers(
    folder: Path | None = None, *, postgres_options: Mapping[str, str] | None = None, redis: str | None = None
) -> Iterator[Servers]:
    """Run PostgreSQL, with an empty database `forgekeeper`, and Redis inside the context.

    Without *folder*, data is in a temporary folder that is removed at the end, and durability is traded for speed. With
    *folder*, the data stays for the next start; a folder that is in use is refused. *postgres_options* are server
    settings such as `fsync`. *redis* is the server's program; by default a server on the PATH, else the bundled one.
    """
    with ExitStack() as stack:
        yield _start_servers(stack, folder, postgres_options or {}, redis)


def _start_servers(stack: ExitStack, folder: Path | None, options: Mapping[str, str], program: str | None) -> Servers:
    found = find_programs(program)
    try:
        site = stack.enter_context(open_folders(folder))
        redis = _start_redis(site, found.redis)
        stack.callback(redis.stop)
        postgres = start_postgres(site, found, options)
        stack.callback(postgres.stop)
        redis.wait_until_ready()
        postgres.wait_until_ready()
    except OSError as error:
        raise EmbeddedError(str(error)) from error
    # The servers hold the lock; forks of this process must not.
    site.lock.close()
    urls = database_url(site), redis_url(site)
    warning = BUNDLED_REDIS_WARNING if found.redis == find_bundled_redis() else None
    return Servers(site.folder, *urls, postgres.process.pid, redis.process.pid, warning)


def database_url(site: ServerFolders) -> str:
    """Return the URI for libpq; with the port, because libpq would otherwise use PGPORT."""
    return f"postgresql://forgekeeper@/forgekeeper?host={quote(os.fsencode(site.sockets))}&port={POSTGRES_PORT}"


def redis_url(site: ServerFolders) -> str:
    """Return the URL for `redis.Redis.from_url`."""
    return f"unix://{quote(os.fsencode(site.sockets / 'redis.sock'))}?db=0"


def _start_redis(site: ServerFolders, binary: str) -> EmbeddedServer:
    """Start Redis without waiting for it; if killed, a permanent one loses at most a second."""
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
    process = start_program([binary, *arguments], site, log=log, death_signal=signal.SIGTERM)
    return EmbeddedServer("Redis", process, log, signal.SIGTERM)


def start_postgres(site: ServerFolders, programs: Programs, options: Mapping[str, str]) -> EmbeddedServer:
    """Start PostgreSQL without waiting for it; create the database if it does not exist."""
    data, log = site.folder / "postgres", site.folder / "postgres.log"
    settings = POSTGRES_SETTINGS | (TEMPORARY_SETTINGS if site.temporary else {})
    if not data.exists():
        _create_data_folder(data, settings, site, programs, log)
    # We hold the folder's lock, so no server runs here: this file is left by a killed server, and would prevent the
    # start if another process has its id now.
    (data / "postmaster.pid").unlink(missing_ok=True)
    quoted = str(site.sockets).replace('"', '""')
    listening = {
        "listen_addresses": "",
        "port": POSTGRES_PORT,
        "unix_socket_directories": f'"{quoted}"',
        "unix_socket_permissions": "0700",
    }
    command = [f"{programs.postgres}/postgres", "-D", str(data), *_write_options({**settings, **listening, **options})]
    process = start_program(command, site, log=log, prefix=programs.prefix, death_signal=signal.SIGINT)
    return EmbeddedServer("PostgreSQL", process, log, signal.SIGINT)


def _create_data_folder(
    data: Path, settings: Mapping[str, str], site: ServerFolders, programs: Programs, log: Path
) -> None:
    """Create the data folder under a temporary name, so that the final name means complete."""
    unfinished = data.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    if programs.owner is not None:
        os.chown(unfinished, programs.owner, -1)
    where = ["-D", str(unfinished)]
    unsynced = ["--no-sync"] if site.temporary else []
    flags = _write_options({**settings, "exit_on_error": "on"})
    for (program, *arguments), given in (
        (["initdb", *where, *INITDB_OPTIONS, *unsynced], b""),
        (["postgres", "--single", *where, *flags, "postgres"], b"CREATE DATABASE forgekeeper\n"),
    ):
        command = [f"{programs.postgres}/{program}", *arguments]
        process = start_program(
            command, site, log=log, prefix=programs.prefix, death_signal=signal.SIGKILL, stdin=subprocess.PIPE
        )
        process.communicate(given)
        if process.returncode != 0:
            raise create_start_error("PostgreSQL", log)
    unfinished.rename(data)


def _write_options(settings: Mapping[str, str]) -> list[str]:
    return [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
