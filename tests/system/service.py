"""A command of forgekeeper's as a real process, started as an operator starts it."""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from tests.harness.programs import Program
from tests.harness.waiting import wait_until

LIMIT = 30.0


class Service(Program):
    """A command that is started again whenever it has died, each life with a log of its own."""

    def __init__(self, name, arguments, folder, settings, module="forgekeeper.cli"):
        self.name, self.arguments, self.folder, self.lives = name, arguments, folder, 0
        self.prepare("-m", module, *arguments, cwd=folder, **settings)

    def start(self):
        self.lives += 1
        self.log = self.folder / f"{self.name}-{self.lives}.log"
        super().start()

    def restart_if_dead(self):
        if self.process.poll() is not None:
            self.kill()
            self.start()

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
        with suppress(OSError):
            text = Path(f"/proc/{self.pid}/status").read_text()
            lines = dict(line.split(":\t", 1) for line in text.splitlines())
            return bool((int(lines["SigCgt"], 16) | int(lines["SigBlk"], 16)) & bit)
        return True
