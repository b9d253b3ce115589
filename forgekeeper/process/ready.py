"""Readiness: how a process tells its supervisor, and its page, that it is at work."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from metrics.endpoint import FOLDER, READY


def tell_supervisor(*facts: str) -> None:
    """Send facts such as ``READY=1`` or ``STATUS=…`` to systemd, if that is who has started us; see sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        # A supervisor that does not listen must not hold up who has better things to do.
        supervisor.setblocking(False)
        # With an at sign it is a name of the kernel's own, which has a NUL instead.
        supervisor.sendto("\n".join(facts).encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)


def mark(*, ready: bool) -> None:
    """Say to the page of all processes of this worker whether this one takes messages."""
    folder = os.environ.get(FOLDER)
    if folder:
        file = Path(folder) / f"{os.getpid()}{READY}"
        with suppress(OSError):
            if ready:
                file.touch()
            else:
                file.unlink(missing_ok=True)
