"""A server process that ends with us, and the folder of a pair of servers, with a lock."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from demo.servers.machine import EmbeddedError

FOLDER_LOCK_SECONDS = 5.0
"""Seconds that the servers of a killed process may take to end."""
MAX_SOCKET_PATH_BYTES = 107
SOCKET_NAME = ".s.PGSQL.5432"
SERVER_START_SECONDS = 90.0
SERVER_STOP_SECONDS = 20.0
"""Seconds until a server is killed; PostgreSQL writes everything to disk first."""
READY_LOG_TEXT = b"eady to accept connections"
"""Log text of both servers when they have loaded their data and accept commands."""
MAX_SHOWN_LOG_LINES = 15


@dataclass(frozen=True)
class ServerFolders:
    """Folders of a pair of servers, which inherit *lock*: it lasts until both have ended."""

    folder: Path
    sockets: Path
    temporary: bool
    lock: BinaryIO


@contextmanager
def open_folders(given: Path | None) -> Iterator[ServerFolders]:
    """Create and lock the folder, or a temporary one, which is removed at the end."""
    with ExitStack() as stack:
        folder = given.absolute() if given else _create_temporary_folder(stack)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = stack.enter_context((folder / "lock").open("ab"))
        _lock_folder(folder, lock)
        sockets = folder / "sockets"
        longest = os.fsencode(sockets / SOCKET_NAME)
        # libpq separates hosts by commas, which cannot be quoted.
        if len(longest) <= MAX_SOCKET_PATH_BYTES and b"," not in longest:
            shutil.rmtree(sockets, ignore_errors=True)
            sockets.mkdir(mode=0o700)
        else:
            sockets = _create_temporary_folder(stack, "/tmp")  # noqa: S108, as short as can be
        yield ServerFolders(folder, sockets, given is None, lock)


def _create_temporary_folder(stack: ExitStack, parent: str | None = None) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="forgekeeper-", dir=parent))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _lock_folder(folder: Path, lock: BinaryIO) -> None:
    ends = time.monotonic() + FOLDER_LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > ends:
                error = f"{folder} is in use by other embedded servers; stop them, or use another folder."
                raise EmbeddedError(error) from None
            time.sleep(0.01)
        else:
            return


@dataclass(frozen=True)
class EmbeddedServer:
    """A started server; *stop_signal* requests an orderly shutdown."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    stop_signal: signal.Signals

    def wait_until_ready(self) -> None:
        """Wait for connections; raise `EmbeddedError` if the server ends first or takes too long."""
        ends = time.monotonic() + SERVER_START_SECONDS
        while READY_LOG_TEXT not in self.log.read_bytes():
            if self.process.poll() is not None or time.monotonic() > ends:
                raise create_start_error(self.name, self.log)
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop the server; return when it has ended."""
        self.process.send_signal(self.stop_signal)
        # A suspended process does not act on other signals.
        self.process.send_signal(signal.SIGCONT)
        try:
            self.process.wait(SERVER_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start_program(
    command: Sequence[str],
    site: ServerFolders,
    *,
    log: Path,
    prefix: Sequence[str] = (),
    death_signal: signal.Signals,
    stdin: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Start *command* with a new *log*; the kernel sends it *death_signal* if this thread ends."""
    # After the prefix: the kernel resets this when a process enters a user namespace.
    setpriv = ["setpriv", f"--pdeathsig={death_signal.name.removeprefix('SIG')}", "--"]
    # We may have died before the signal was set.
    if_we_live = ["sh", "-c", 'test "$PPID" = "$0" && exec "$@"', str(os.getpid())]
    # The servers must not use a person's settings for PostgreSQL clients, or language.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    with log.open("wb") as output:
        return subprocess.Popen(
            [*prefix, *setpriv, *if_we_live, *command],
            env={**kept, "LC_ALL": "C", "TZ": "UTC"},
            stdin=stdin,
            stdout=output,
            stderr=output,
            pass_fds=[site.lock.fileno()],
            cwd="/",
            umask=0o077,
            # Ctrl-C at the terminal is for us: we may need the servers to finish our work.
            start_new_session=True,
        )


def create_start_error(name: str, log: Path) -> EmbeddedError:
    """Return the error with the end of *log*, which may be removed soon."""
    tail = log.read_text(errors="replace").splitlines()[-MAX_SHOWN_LOG_LINES:]
    return EmbeddedError("\n".join([f"The embedded {name} did not start; the end of its log:", *tail]))
