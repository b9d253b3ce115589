"""One server process: a child of the keeper that does not outlive it."""

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from forgekeeper.embedded.errors import EmbeddedError
from forgekeeper.embedded.folder import Site
from forgekeeper.embedded.waiting import wait_until

START_PATIENCE = 30.0
# PostgreSQL writes everything back before it goes; a slow disk may take its time.
STOP_PATIENCE = 20.0
LOG_TAIL_LINES = 15


@dataclass(frozen=True)
class Server:
    """A running server and the signals that stop it, the gentlest first."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    stop_signals: Sequence[signal.Signals]

    def wait_until_ready(self, answers: Callable[[], bool]) -> None:
        """Return when the server *answers*; raise EmbeddedError if it dies first or takes too long."""
        wait_until(lambda: self.process.poll() is not None or answers(), START_PATIENCE)
        if self.process.poll() is not None or not answers():
            raise not_started(self.name, self.log)

    def stop(self) -> None:
        """Stop the server, less and less gently; return when it is gone."""
        for stop_signal in self.stop_signals:
            self.process.send_signal(stop_signal)
            # A server somebody has paused would not hear us.
            self.process.send_signal(signal.SIGCONT)
            try:
                self.process.wait(STOP_PATIENCE)
            except subprocess.TimeoutExpired:
                continue
            return


def spawn(
    command: Sequence[str],
    site: Site,
    *,
    log: Path,
    prefix: Sequence[str] = (),
    dies_by: signal.Signals,
    stdin: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Start *command* so that the kernel sends it *dies_by* when we die."""
    # The kernel forgets that wish when a process enters a user namespace, so setpriv comes after the prefix.
    setpriv = ["setpriv", f"--pdeathsig={dies_by.name.removeprefix('SIG')}", "--"]
    with log.open("ab") as output:
        return subprocess.Popen(
            [*prefix, *setpriv, *command],
            env=_environment(),
            stdin=stdin,
            stdout=output,
            stderr=output,
            pass_fds=[site.lock],
        )


def not_started(name: str, log: Path) -> EmbeddedError:
    """Build the error that shows the end of *log*, which may be about to be removed."""
    tail = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return EmbeddedError("\n".join([f"The embedded {name} did not start; the end of its log:", *tail]))


def _environment() -> dict[str, str]:
    """Keep the settings a person has for PostgreSQL clients, and their language, away from the servers."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return {**kept, "LC_ALL": "C", "TZ": "UTC"}
