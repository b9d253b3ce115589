"""Ports that no other test gets, found now and listened at later."""

import os
import socket
from contextlib import suppress
from itertools import count as counted

FIRST, LAST, ROW = 15_000, 32_000, 8
"""Below those that the kernel gives to whoever connects, or asks for any."""
PROCESSES = 8
ROWS = (LAST - FIRST) // PROCESSES // ROW
# Each process of a run of tests has a part of its own: one that starts slowly must find its port still free.
_part = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % PROCESSES
_turns = counted(os.getpid())


def free_ports(count):
    """Return so many ports of loopback in a row, `ROW` at most, that nobody listens at."""
    while True:
        first = FIRST + (_part * ROWS + next(_turns) % ROWS) * ROW
        ports = list(range(first, first + count))
        if all(map(_is_free, ports)):
            return ports


def _is_free(port):
    with suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False
