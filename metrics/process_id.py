"""Patch of `prometheus_client.values.ValueClass`: the process's id is asked for once, and after each fork.

prometheus_client 0.26.0 asks the system for it whenever it counts, which takes as long as to count.  It may go when
`test_the_client_asks_for_the_process_s_id_whenever_it_counts` in `tests/engine/test_patches.py` fails.
"""

from __future__ import annotations

import os

from prometheus_client import values
from prometheus_client.values import MultiProcessValue


def install() -> None:
    """Let this process count by it.  It has to count in files."""
    known = [os.getpid()]
    os.register_at_fork(after_in_child=lambda: known.__setitem__(0, os.getpid()))
    values.ValueClass = MultiProcessValue(lambda: known[0])  # type: ignore[no-untyped-call]
