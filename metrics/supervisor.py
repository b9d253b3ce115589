"""Notifications for systemd, if it started this process: see sd_notify(3)."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress

from metrics.threads import PeriodicThread, find_stalled

WATCHDOG_VARIABLE = "WATCHDOG_USEC"
"""Variable with `WatchdogSec` of the unit, in microseconds."""


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


def is_watched() -> bool:
    """Return whether systemd expects reports of this process."""
    return _read_watchdog_seconds() > 0


def start_watchdog(find_stalled_reason: Callable[[], str | None] = find_stalled) -> None:
    """Report this process as alive twice per `WatchdogSec`, unless *find_stalled_reason* returns a reason.

    systemd kills and restarts a service that does not report itself.  Without `WatchdogSec` nothing is started.
    """

    def report() -> None:
        if find_stalled_reason() is None:
            tell_supervisor("WATCHDOG=1")

    if is_watched():
        PeriodicThread("watchdog", report, interval=_read_watchdog_seconds() / 2).start()


def _read_watchdog_seconds() -> float:
    microseconds = os.environ.get(WATCHDOG_VARIABLE, "")
    return int(microseconds) / 1e6 if microseconds.isdigit() else 0.0
