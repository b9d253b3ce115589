"""Run PostgreSQL in a folder, with an empty database `forgekeeper` in it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from demo.servers.folder import Site
from demo.servers.machine import Programs
from demo.servers.server import Server, not_started, spawn

NAME = "PostgreSQL"
PORT = "5432"  # a part of the socket's name
CREATE_TIMEOUT = 120.0
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
    # The default keeps shared memory in /dev/shm, where a killed server would leave it.
    "dynamic_shared_memory_type": "mmap",
}
# What is removed in the end need not survive a power failure.
TEMPORARY_SETTINGS = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


def start(site: Site, programs: Programs, options: Mapping[str, str]) -> Server:
    """Start PostgreSQL, without waiting for it; make the database first where there is none."""
    data, log = site.folder / "postgres", site.folder / "postgres.log"
    if not data.exists():
        _create(data, site, programs, log)
    # We hold the folder's lock, so no server runs here: this file is a killed one's, and would prevent the start
    # where another process has its number now.
    (data / "postmaster.pid").unlink(missing_ok=True)
    flags = _flags(_settings(site) | dict(options) | _listening(site))
    command = [f"{programs.postgres}/postgres", "-D", str(data), *flags]
    process = spawn(command, site, log=log, prefix=programs.prefix, dies_by=signal.SIGINT)
    return Server(NAME, process, log, signal.SIGINT)


def url(site: Site) -> str:
    """Return the URI that libpq accepts; with the port, as libpq would take the one in PGPORT."""
    return f"postgresql://forgekeeper@/forgekeeper?host={quote(os.fsencode(site.sockets))}&port={PORT}"


def _settings(site: Site) -> dict[str, str]:
    return SETTINGS | (TEMPORARY_SETTINGS if site.temporary else {})


def _listening(site: Site) -> dict[str, str]:
    quoted = str(site.sockets).replace('"', '""')
    return {
        "listen_addresses": "",
        "port": PORT,
        "unix_socket_directories": f'"{quoted}"',
        "unix_socket_permissions": "0700",
    }


def _create(data: Path, site: Site, programs: Programs, log: Path) -> None:
    """Make the data folder under another name, so that one with the right name is complete."""
    unfinished = data.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    if programs.owner is not None:
        os.chown(unfinished, programs.owner, -1)
    where = ["-D", str(unfinished)]
    unsynced = ["--no-sync"] if site.temporary else []
    flags = _flags(_settings(site) | {"exit_on_error": "on"})
    for command, given in (
        (["initdb", *where, *INITDB_OPTIONS, *unsynced], b""),
        (["postgres", "--single", *where, *flags, "postgres"], b"CREATE DATABASE forgekeeper\n"),
    ):
        _run([f"{programs.postgres}/{command[0]}", *command[1:]], given, site, programs, log)
    unfinished.rename(data)


def _run(command: list[str], given: bytes, site: Site, programs: Programs, log: Path) -> None:
    process = spawn(command, site, log=log, prefix=programs.prefix, dies_by=signal.SIGKILL, stdin=subprocess.PIPE)
    try:
        process.communicate(given, CREATE_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
    if process.wait() != 0:
        raise not_started(NAME, log)


def _flags(settings: Mapping[str, str]) -> list[str]:
    return [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
