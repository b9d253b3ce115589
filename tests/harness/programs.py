"""Programs of ours as processes: started with settings, their log in a file, and never left running."""

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
"""What a worker process says once it takes messages."""


class Program:
    """`python <words>` in a session of its own; *settings* are given without their prefix, in any case."""

    def __init__(self, log: Path, *words: Any, cwd: Path | None = None, **settings: Any) -> None:
        self.log = log
        self.prepare(*words, cwd=cwd, **settings)
        self.start()

    def prepare(self, *words: Any, cwd: Path | None = None, **settings: Any) -> None:
        """Say what is to be started."""
        self._words, self._cwd = words, cwd
        self.settings = {PREFIX + name.upper(): str(value) for name, value in settings.items()}

    def start(self) -> None:
        """Start it."""
        environment = self.environment() | self.settings
        with self.log.open("ab") as output:
            self.process = start(self._words, env=environment, cwd=self._cwd, stdout=output, stderr=output)

    def environment(self) -> dict[str, str]:
        """Return what it has besides its settings."""
        return {**os.environ, "PYTHONPATH": str(ROOT)}

    @property
    def pid(self) -> int:
        """The id of the process; for a worker that of dramatiq's master."""
        pid: int = self.process.pid
        return pid

    @property
    def children(self) -> list[int]:
        """The ids of its children, whichever thread has started them."""
        found: list[int] = []
        for task in Path(f"/proc/{self.pid}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, task.read_text().split())
        return found

    def text(self) -> str:
        """Read its log."""
        return self.log.read_text(errors="replace")

    def lines(self) -> list[dict[str, Any]]:
        """Read the whole lines of its log that are JSON; one may stand behind a part of a trace of Python's."""
        whole, _, _ = self.text().rpartition("\n")
        return [orjson.loads(line[line.rindex(LINE) :]) for line in whole.splitlines() if LINE in line]

    def said(self, message: str) -> list[dict[str, Any]]:
        """Find the lines with that sentence, so far."""
        return [line for line in self.lines() if line["message"] == message]

    def end(self) -> int:
        """Ask it to end; return its exit status."""
        self.process.terminate()
        status: int = self.process.wait(scale_timeout(LIMIT))
        return status

    def kill(self) -> None:
        """End all of its session at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        # One that has just begun may not have its session yet.
        self.process.kill()
        self.process.wait()


def eventually(condition: Any, limit: float = LIMIT) -> None:
    """Wait for a condition; fail where it does not come to hold in time."""
    assert wait_until(condition, limit), "it did not come to that in time"
