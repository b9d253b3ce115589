"""Child processes of a command: started together, ended together, never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from sysconfig import get_path
from types import TracebackType
from typing import IO, Self

from forgekeeper.process import signals

MARGIN = 5.0
"""Seconds beyond the setting that a command may take to end: they all promise to end within it."""


def python(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module of ours, and nothing of the current folder's.

    Without `-P` that folder would come first of all: what lies there under the name of any module would be
    run, with every password that we have.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def python_path() -> str:
    """Return the PYTHONPATH with which children find us: no part of it may depend on the current folder."""
    root = str(Path(__file__).resolve().parent.parent.parent)
    given = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if Path(part).is_absolute()]
    # Where packages are installed children look anyway, and after the standard library.
    installed = {get_path("purelib"), get_path("platlib")}
    return os.pathsep.join([*([] if root in installed else [root]), *given])


class Processes:
    """A context in which `forgekeeper` commands run beside this one.

    Leaving it ends them, the last started first, with SIGTERM, and those that are still there
    a little after *shutdown_timeout* with SIGKILL.  If this process dies, however it dies, they
    get their SIGTERM from the kernel.
    """

    def __init__(
        self, environment: Mapping[str, str], *, shutdown_timeout: timedelta, output: IO[bytes] | None = None
    ) -> None:
        self._patience = shutdown_timeout.total_seconds() + MARGIN
        self._environment = {**os.environ, **environment}
        self._output = output
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def start(self, *arguments: str) -> None:
        """Start ``forgekeeper <arguments>``."""
        self._children[" ".join(arguments)] = subprocess.Popen(
            python("forgekeeper.cli", *arguments),
            env={**self._environment, "PYTHONPATH": python_path()},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            # A Ctrl-C is for us alone: we tell them, in order.
            start_new_session=True,
            preexec_fn=signals.end_with_parent,  # noqa: PLW1509, one system call, no thread of ours holds a lock
        )

    def ended(self) -> str | None:
        """Name a command that has ended by itself, None while all run."""
        return next((name for name, child in self._children.items() if child.poll() is not None), None)

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for child in reversed(self._children.values()):
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
        ends = time.monotonic() + self._patience
        for child in reversed(self._children.values()):
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, ends - time.monotonic()))
                continue
            # It and its processes: each command leads a session of its own.
            os.killpg(child.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                child.wait(MARGIN)
