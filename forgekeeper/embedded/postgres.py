"""Run PostgreSQL in a site, with the database `forgekeeper` in it."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from forgekeeper.embedded import pid_file
from forgekeeper.embedded.folder import Site
from forgekeeper.embedded.server import Server, not_started, spawn

NAME = "PostgreSQL"
# Of the socket's name only.
PORT = "5432"
CREATE_PATIENCE = 120.0
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
# What is removed on leaving anyway need not survive a power failure.
TEMPORARY_SETTINGS = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


@dataclass(frozen=True)
class Postgres:
    """The binaries, the command that makes us somebody they run as, and the owner of the files, if not us."""

    site: Site
    binaries: Path
    prefix: Sequence[str]
    owner: int | None

    def start(self, options: Mapping[str, str]) -> Server:
        """Start PostgreSQL, making the database first where there is none; return without waiting for it."""
        self._log.unlink(missing_ok=True)
        if not self._data.exists():
            self._create()
        pid_file.forget_dead_server(self._data)
        settings = self._settings | dict(options) | self._listen
        command = [self._binary("postgres"), "-D", str(self._data), *_flags(settings)]
        process = spawn(command, self.site, log=self._log, prefix=self.prefix, dies_by=signal.SIGINT)
        return Server(NAME, process, self._log, (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL))

    def url(self) -> str:
        """Return the URI libpq accepts."""
        # With the port, lest libpq takes the one in PGPORT.
        host = quote(os.fsencode(self.site.sockets))
        return f"postgresql://forgekeeper@/forgekeeper?host={host}&port={PORT}"

    def answers(self, server: Server) -> Callable[[], bool]:
        """Return the question whether the server takes connections."""
        return lambda: pid_file.is_ready(self._data, server.process.pid)

    @property
    def _data(self) -> Path:
        return self.site.folder / "postgres"

    @property
    def _log(self) -> Path:
        return self.site.folder / "postgres.log"

    def _binary(self, name: str) -> str:
        return str(self.binaries / name)

    @property
    def _settings(self) -> dict[str, str]:
        return SETTINGS | (TEMPORARY_SETTINGS if self.site.temporary else {})

    @property
    def _listen(self) -> dict[str, str]:
        quoted = str(self.site.sockets).replace('"', '""')
        return {
            "listen_addresses": "",
            "port": PORT,
            "unix_socket_directories": f'"{quoted}"',
            "unix_socket_permissions": "0700",
        }

    def _create(self) -> None:
        """Make the data folder under another name, so that what bears the right one is complete."""
        unfinished = self._data.with_suffix(".unfinished")
        if unfinished.exists():
            shutil.rmtree(unfinished)
        unfinished.mkdir()
        if self.owner is not None:
            os.chown(unfinished, self.owner, -1)
        unsynced = ["--no-sync"] if self.site.temporary else []
        self._run([self._binary("initdb"), "-D", str(unfinished), *INITDB_OPTIONS, *unsynced])
        flags = _flags(self._settings | {"exit_on_error": "on"})
        self._run(
            [self._binary("postgres"), "--single", "-D", str(unfinished), *flags, "postgres"],
            b"CREATE DATABASE forgekeeper\n",
        )
        unfinished.rename(self._data)

    def _run(self, command: Sequence[str], text: bytes = b"") -> None:
        process = spawn(
            command,
            self.site,
            log=self._log,
            prefix=self.prefix,
            dies_by=signal.SIGKILL,
            stdin=subprocess.PIPE,
        )
        try:
            process.communicate(text, CREATE_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
        if process.wait() != 0:
            raise not_started(NAME, self._log)


def _flags(settings: Mapping[str, str]) -> list[str]:
    return [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
