"""Find free ports that no other test gets, for a server that starts later."""

import os
import socket
from contextlib import suppress
from itertools import count as counted

FIRST, LAST, ROW = 15_000, 32_000, 8
"""Range of ports, below the kernel's ephemeral ports; each call searches `ROW` ports in a row."""
PROCESSES = 8
ROWS = (LAST - FIRST) // PROCESSES // ROW
# Each test process has its own part of the range: a port must still be free when a slow program starts.
_part = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % PROCESSES
_turns = counted(os.getpid())


def free_ports(count):
    """Return *count* consecutive free ports of loopback, at most `ROW`."""
    while True:
        first = FIRST + (_part * ROWS + next(_turns) % ROWS) * ROW
        ports = list(range(first, first + count))
        if all(map(_is_free, ports)):
            return ports


def _is_free(port):
    with suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False


def accepts_connections(address):
    """Return whether a server listens at an address: a socket's path, or a port of this machine.

    A socket has its file before its server listens.
    """
    family, place = (
        (socket.AF_INET, ("127.0.0.1", address)) if isinstance(address, int) else (socket.AF_UNIX, str(address))
    )
    with socket.socket(family) as client:
        return client.connect_ex(place) == 0
