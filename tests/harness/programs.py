"""Start programs of the product as processes, with settings and a log file, and end them."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from forgekeeper.platform.settings import PREFIX
from tests.harness.forks import start
from tests.harness.waiting import scale_timeout, wait_until

ROOT = Path(__file__).parents[2]
LIMIT = 60.0
LINE = '{"at":'
READY = "Worker process is ready for action."
"""Line that a worker process logs when it takes messages."""


class Program:
    """Runs `python <words>` in a session of its own; names of *settings* lack the prefix, in any case."""

    def __init__(self, log: Path, *words: Any, cwd: Path | None = None, **settings: Any) -> None:
        self.log = log
        self.prepare(*words, cwd=cwd, **settings)
        self.start()

    def prepare(self, *words: Any, cwd: Path | None = None, **settings: Any) -> None:
        """Set the command line, the folder and the settings for the next start."""
        self._words, self._cwd = words, cwd
        self.settings = {PREFIX + name.upper(): str(value) for name, value in settings.items()}

    def start(self) -> None:
        """Start the program; its output is appended to the log."""
        environment = self.environment() | self.settings
        with self.log.open("ab") as output:
            self.process = start(self._words, env=environment, cwd=self._cwd, stdout=output, stderr=output)

    def environment(self) -> dict[str, str]:
        """Return the environment without the settings."""
        return {**os.environ, "PYTHONPATH": str(ROOT)}

    @property
    def pid(self) -> int:
        """Id of the process; for a worker the id of dramatiq's master process."""
        pid: int = self.process.pid
        return pid

    @property
    def children(self) -> list[int]:
        """Ids of the child processes, of all threads."""
        found: list[int] = []
        for task in Path(f"/proc/{self.pid}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, task.read_text().split())
        return found

    def text(self) -> str:
        """Return the text of the log."""
        return self.log.read_text(errors="replace")

    def lines(self) -> list[dict[str, Any]]:
        """Parse the complete JSON lines of the log; a part of a Python traceback may precede a JSON line."""
        whole, _, _ = self.text().rpartition("\n")
        return [orjson.loads(line[line.rindex(LINE) :]) for line in whole.splitlines() if LINE in line]

    def said(self, message: str) -> list[dict[str, Any]]:
        """Return the log lines with this message so far."""
        return [line for line in self.lines() if line["message"] == message]

    def end(self) -> int:
        """Send SIGTERM, and wait; return the exit status."""
        self.process.terminate()
        status: int = self.process.wait(scale_timeout(LIMIT))
        return status

    def kill(self) -> None:
        """Kill all processes of the session."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        # A process that has just started may not have its session yet.
        self.process.kill()
        self.process.wait()


def eventually(condition: Any, limit: float = LIMIT) -> None:
    """Wait for a condition; fail if it does not hold in time."""
    assert wait_until(condition, limit), "the condition did not hold in time"
