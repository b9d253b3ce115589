"""Ports that no other test gets, found now and listened at later."""

import os
import socket
from contextlib import suppress
from itertools import count as counted

FIRST, LAST, ROW = 15_000, 32_000, 8
"""Below those that the kernel gives to whoever connects, or asks for any."""
# Far apart for two processes of tests that started together.
_turns = counted(os.getpid() * 97)


def free_ports(count):
    """Return so many ports of loopback in a row, `ROW` at most, that nobody listens at."""
    while True:
        first = FIRST + next(_turns) * ROW % (LAST - FIRST)
        ports = list(range(first, first + count))
        if all(map(_is_free, ports)):
            return ports


def _is_free(port):
    with suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False
