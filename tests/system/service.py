"""A command of forgekeeper's as a real process, started as an operator starts it."""

import json
import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.harness import forks
from tests.harness.waiting import wait_until

ROOT = Path(__file__).parents[2]
LIMIT = 30.0


@dataclass
class Service:
    """A command that is started again whenever it has died, each life with a log of its own."""

    name: str
    arguments: tuple[str, ...]
    folder: Path
    environment: dict[str, str]
    module: str = "forgekeeper.cli"
    lives: int = 0

    def start(self):
        self.lives += 1
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **self.environment}
        with self._log(self.lives).open("wb") as log:
            words = ("-m", self.module, *self.arguments)
            self.process = forks.start(words, env=environment, cwd=self.folder, stdout=log, stderr=log)

    def restart_if_dead(self):
        if self.process.poll() is not None:
            self.kill()
            self.start()

    @property
    def children(self):
        try:
            text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return []
        return [int(pid) for pid in text.split()]

    def kill(self):
        """Kill the command and all its processes; they are a process group of their own."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        # One that has just begun may not have its group yet.
        self.process.kill()
        self.process.wait()

    def kill_a_child(self, dice):
        """Kill one child, if there is any yet."""
        if children := self.children:
            with suppress(ProcessLookupError):
                os.kill(dice.choice(children), signal.SIGKILL)

    def stop(self):
        """Ask it to end; return its status.  One that has just begun to start would not hear it, but die of it."""
        wait_until(lambda: self.process.poll() is not None or self._hears_sigterm(), LIMIT)
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(LIMIT)
        self.kill()
        return self.process.returncode

    def _hears_sigterm(self):
        """Say whether it has a handler for SIGTERM, or blocks it until it has one."""
        bit = 1 << signal.SIGTERM - 1
        with suppress(FileNotFoundError, ProcessLookupError):
            text = Path(f"/proc/{self.process.pid}/status").read_text()
            lines = dict(line.split(":\t", 1) for line in text.splitlines())
            return bool((int(lines["SigCgt"], 16) | int(lines["SigBlk"], 16)) & bit)
        return True

    def lines(self):
        """Yield the facts of the log lines of all lives; a killed process's last one may be cut."""
        for life in range(1, self.lives + 1):
            for line in self._log(life).read_text(errors="replace").splitlines():
                with suppress(ValueError):
                    yield json.loads(line)

    def said(self, message):
        """List the lines with that message."""
        return [line for line in self.lines() if line.get("message") == message]

    def last_lines(self, count):
        """Return the last lines of the last life's log."""
        return self._log(self.lives).read_text(errors="replace").splitlines()[-count:]

    def _log(self, life):
        return self.folder / f"{self.name}-{life}.log"
