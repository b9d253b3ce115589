"""Run command lines in bash as an operator does: read the output, press Ctrl-C, and find processes that still run."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self
from uuid import uuid4

from tests.harness.waiting import scale_timeout, wait_until

TIMEOUT_SECONDS = 120.0
MARK = "TERMINAL_MARK"
REMOVED_VARIABLES = ("FORGEKEEPER_", "MAKE", "MFLAGS", "PG", "PYTEST_", "PYTHONPATH", "THOROUGH", "VIRTUAL_ENV")
"""Prefixes of environment variables that tests set and an operator's terminal lacks."""


class ShellCommand:
    """A command line that bash runs, with its output in an unnamed temporary file."""

    def __init__(self, line: str, folder: Path, environment: Mapping[str, str]) -> None:
        self.line = line
        self._output = tempfile.TemporaryFile()  # noqa: SIM115, close() closes it
        self._process = subprocess.Popen(
            ["bash", "-c", line],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )

    def read_output(self) -> str:
        """Return standard output and standard error so far."""
        file = self._output.fileno()
        # The command writes at the offset of this file, and read() would move the offset.
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")

    def wait_for_output(self, text: str) -> bool:
        """Return True as soon as the output contains *text*, False if the command ends without it."""
        wait_until(lambda: text in self.read_output() or self._process.poll() is not None, TIMEOUT_SECONDS)
        return text in self.read_output()

    def interrupt(self) -> None:
        """Send SIGINT to the processes in the foreground, as Ctrl-C does."""
        os.killpg(self._process.pid, signal.SIGINT)

    def wait_for_status(self, timeout_seconds: float = TIMEOUT_SECONDS) -> int:
        """Return the exit status; raise `subprocess.TimeoutExpired` if the command does not end in time."""
        return self._process.wait(scale_timeout(timeout_seconds))

    def close(self) -> None:
        """Kill the shell if it still runs."""
        self._process.kill()
        self._process.wait()
        self._output.close()


class Terminal:
    """A folder and an environment for commands.  Leaving the context kills every process that they have started."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder, self._mark = folder, uuid4().hex
        self._commands: list[ShellCommand] = []
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(REMOVED_VARIABLES)}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._environment = {**inherited, "PATH": path, MARK: self._mark, **environment}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for pid in self.find_processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for command in self._commands:
            command.close()

    def start(self, line: str) -> ShellCommand:
        """Start a command line."""
        self._commands.append(ShellCommand(line, self._folder, self._environment))
        return self._commands[-1]

    def leaves_no_process(self) -> bool:
        """Wait until every process of the commands has ended."""
        return wait_until(lambda: not self.find_processes(), TIMEOUT_SECONDS)

    def find_processes(self) -> list[int]:
        """Return the ids of processes that have inherited the mark or work in the folder.

        PostgreSQL and Redis overwrite their environment, and with it the mark, with their titles.
        """
        return [int(process.name) for process in Path("/proc").glob("[0-9]*") if self._is_ours(process)]

    def _is_ours(self, process: Path) -> bool:
        with suppress(OSError):  # it has ended
            if f"{MARK}={self._mark}".encode() in (process / "environ").read_bytes():
                return True
            return (process / "cwd").readlink().is_relative_to(self._folder)
        return False
