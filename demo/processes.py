"""Child processes of a command: started together, ended together, never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import IO, Self

from forgekeeper.cli.serving import python, python_path
from forgekeeper.process import signals

MARGIN = 5.0
"""Seconds beyond the setting that a command may take to end: they all promise to end within it."""


class Processes:
    """A context in which `forgekeeper` commands run beside this one.

    Leaving it ends them, the last started first, with SIGTERM, and those that are still there a little after
    *shutdown_timeout* with SIGKILL.  If this process dies, by whatever signal, the kernel sends them a SIGTERM.
    """

    def __init__(
        self, environment: Mapping[str, str], *, shutdown_timeout: timedelta, output: IO[bytes] | None = None
    ) -> None:
        self._timeout = shutdown_timeout.total_seconds() + MARGIN
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
            # Ctrl-C is for us alone: we end them, in order.
            start_new_session=True,
            preexec_fn=signals.end_with_parent,  # noqa: PLW1509, one system call, no thread of ours holds a lock
        )

    def ended(self) -> str | None:
        """Name a command that has ended by itself, None while all run."""
        return next((name for name, child in self._children.items() if child.poll() is not None), None)

    def __exit__(self, *_error: object) -> None:
        for child in reversed(self._children.values()):
            child.send_signal(signal.SIGTERM)
        ends = time.monotonic() + self._timeout
        for child in reversed(self._children.values()):
            try:
                child.wait(max(0.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                # It and its processes: each command leads a session of its own.
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
