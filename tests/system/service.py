"""A command of forgekeeper's as a real process, started as an operator starts it."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

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
    deaths: list[tuple[int, float]] = field(default_factory=list)
    lives: int = 0

    def start(self):
        self.lives += 1
        with self._log(self.lives).open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module, *self.arguments],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": str(ROOT), **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

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
        self.note_deaths([self.process.pid, *self.children])
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def kill_a_child(self, dice):
        """Kill one child; return False when there is none yet."""
        children = self.children
        if not children:
            return False
        child = dice.choice(children)
        self.note_deaths([child])
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def note_deaths(self, pids):
        self.deaths += [(pid, time.time()) for pid in pids]

    def stop(self):
        """Ask it to end; return its status.  One that has just begun to start would not hear it, but die of it."""
        wait_until(lambda: self.process.poll() is not None or self._hears_sigterm(), LIMIT)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
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
                try:
                    yield json.loads(line)
                except ValueError:
                    continue

    def last_lines(self, count):
        """Return the last lines of the last life's log."""
        return self._log(self.lives).read_text(errors="replace").splitlines()[-count:]

    def _log(self, life):
        return self.folder / f"{self.name}-{life}.log"
