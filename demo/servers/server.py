"""One server process: a child that ends with us."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from demo.servers.folder import Site
from demo.servers.machine import EmbeddedError

START_TIMEOUT = 90.0
STOP_TIMEOUT = 20.0
"""Seconds until a server is killed; PostgreSQL writes everything to disk first."""
READY = b"eady to accept connections"
"""What both servers log when they have loaded their data and take commands."""
LOG_LINES = 15


@dataclass(frozen=True)
class Server:
    """A server that was started; *stop_signal* is the one that it ends for in order."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    stop_signal: signal.Signals

    def wait_until_ready(self) -> None:
        """Return when it takes connections; raise `EmbeddedError` if it ends first or takes too long."""
        ends = time.monotonic() + START_TIMEOUT
        while READY not in self.log.read_bytes():
            if self.process.poll() is not None or time.monotonic() > ends:
                raise not_started(self.name, self.log)
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop it; return when it has ended."""
        self.process.send_signal(self.stop_signal)
        # A suspended process does not act on other signals.
        self.process.send_signal(signal.SIGCONT)
        try:
            self.process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def spawn(
    command: Sequence[str],
    site: Site,
    *,
    log: Path,
    prefix: Sequence[str] = (),
    dies_by: signal.Signals,
    stdin: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Start *command* with a new *log*; the kernel sends it *dies_by* when the thread that calls this ends."""
    # After the prefix: the kernel forgets this when a process enters a user namespace.
    setpriv = ["setpriv", f"--pdeathsig={dies_by.name.removeprefix('SIG')}", "--"]
    # We may have died before.
    if_we_live = ["sh", "-c", 'test "$PPID" = "$0" && exec "$@"', str(os.getpid())]
    # A person's settings for PostgreSQL's clients, and their language, are not for the servers.
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


def not_started(name: str, log: Path) -> EmbeddedError:
    """Return the error with the end of *log*, which may be removed soon."""
    tail = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return EmbeddedError("\n".join([f"The embedded {name} did not start; the end of its log:", *tail]))
