"""Ctrl-C and SIGTERM where nobody hears it: while a server that hangs keeps the main thread in a call into C."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from forgekeeper.cli.console import err

AT_ONCE = timedelta(seconds=2)
"""In which whoever hears it has ended."""


@contextmanager
def heard(within: timedelta = AT_ONCE) -> Iterator[None]:
    """End the process *within* that time after a signal, and soon after a second one, should it not end by itself.

    Python tells of a signal between two of its own instructions.  libpq, in its call, waits for its server.
    The system, however, writes the signal's number where it was told to, whatever the main thread is at.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_listen, args=(reading, within), name="interrupts", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writing.close()
        thread.join()
        reading.close()


def _listen(reading: socket.socket, within: timedelta) -> None:
    ends, number = None, 0
    while True:
        # None waits for ever, and 0 not at all: that would be another error.
        reading.settimeout(None if ends is None else max(0.001, ends - time.monotonic()))
        try:
            numbers = reading.recv(64)
        except TimeoutError:
            err.print("forgekeeper: interrupted; a server that does not answer was not waited for", style="red")
            os._exit(128 + number)
        if not numbers:
            return
        for received in filter({signal.SIGINT, signal.SIGTERM}.__contains__, numbers):
            number = received
            soon = time.monotonic() + (within if ends is None else AT_ONCE).total_seconds()
            ends = soon if ends is None else min(ends, soon)
