"""Readiness of a process: the signal to its supervisor, and the file that a worker's endpoint reads."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from metrics.endpoint import MULTIPROC_DIR_VARIABLE, READY_SUFFIX


def tell_supervisor(*facts: str) -> None:
    """Send facts such as ``READY=1`` or ``STATUS=…`` to systemd, if it started this process.

    See sd_notify(3).
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        # A supervisor that does not read must not block this process.
        supervisor.setblocking(False)
        # An at sign marks an abstract socket, whose name begins with a NUL.
        supervisor.sendto("\n".join(facts).encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)


def mark_readiness(*, ready: bool) -> None:
    """Tell this worker's endpoint that this process is alive, and whether it takes messages."""
    folder = os.environ.get(MULTIPROC_DIR_VARIABLE)
    if folder:
        file = Path(folder) / f"{os.getpid()}{READY_SUFFIX}"
        with suppress(OSError):
            if ready:
                file.write_text(str(time.monotonic()))
            else:
                file.unlink(missing_ok=True)
