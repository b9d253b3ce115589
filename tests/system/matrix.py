"""The fault matrix: what is broken on purpose, and the table that says how it went.

A test that injects a fault says so with the fixture `outcome`; `make test-system` ends with the table.  A fault that is
tested elsewhere is listed with where, so that none is forgotten in silence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil, inf

HERE = "not run"
SOAK = "see tests/system/soak/test_soak.py"
MESSAGES = "see tests/delivery/test_messages_in_workers.py"
FAULTS = {
    1: ("worker process killed in a batch", HERE),
    2: ("killed between commit and acknowledgement", HERE),
    3: ("killed between git and the table", HERE),
    4: ("killed between object and its row", HERE),
    5: ("master alone killed", MESSAGES),
    6: ("SIGTERM to the master or to the whole group", MESSAGES),
    7: ("worker stopped for longer than its lease", SOAK),
    8: ("scheduler stopped for a while", SOAK),
    9: ("schedulers started together, and one after another", SOAK),
    10: ("scheduler killed between claim and send", HERE),
    11: ("a clock an hour fast, or set back", "see tests/ledger/test_reconcile.py, tests/guards/test_clocks.py"),
    12: ("change to or from summer time", "see tests/platform/test_cron.py: schedules are kept in UTC"),
    13: ("Redis emptied", SOAK),
    14: ("Redis killed, with its log kept", SOAK),
    15: ("Redis refuses connections", SOAK),
    16: ("reply of Redis lost after execution", SOAK),
    17: ("Redis a black hole", SOAK),
    18: ("Redis out of memory", SOAK),
    19: ("Redis read-only for a while", SOAK),
    20: ("scripts of Redis flushed", SOAK),
    21: ("actor fails while Redis is away", MESSAGES),
    22: ("time limit meets a Redis that stalls", SOAK),
    23: ("poison message", MESSAGES),
    24: ("PostgreSQL sessions terminated", SOAK),
    25: ("PostgreSQL restarted", SOAK),
    26: ("PostgreSQL a black hole in a query", SOAK),
    27: ("rows locked by somebody else", "see tests/workers/test_user_status_cleanup.py"),
    28: ("users change what is cleaned up", "see tests/workers/test_user_status_cleanup.py, test_stale_imports.py"),
    29: ("a snapshot pinned while much is deleted", "see tests/workers/test_user_status_cleanup.py: chunks by keyset"),
    30: ("no connections left", SOAK),
    31: ("object store fails for some keys", "see tests/workers/test_delete_objects.py, test_stale_direct_uploads.py"),
    32: ("upload completed while it is cleaned up", "see tests/workers/test_uploads_machine.py"),
    33: ("store or repositories not mounted", SOAK),
    34: ("git: locks, conflicts, broken and missing repositories", "see tests/targets/test_git_refs.py, …_locks.py"),
    35: ("git hangs", "see tests/workers/test_git_ref_children.py"),
    36: ("pushes beside the cleanup", "see tests/targets/test_git_refs_locks.py"),
    37: ("disk full", HERE),
    38: ("store used after a fork", "see tests/targets/test_objects.py"),
    39: ("metrics cannot be written", HERE),
    40: ("ten times the load", "see benchmarks"),
    41: ("a message prefetched by a worker that is told to end", MESSAGES),
    42: ("cron message beside full queues", "see tests/demo/test_up.py: long children's queues have their own workers"),
    43: ("everything at once", HERE),
    44: ("schedulers killed", SOAK),
    45: ("PostgreSQL frozen", SOAK),
    46: ("Redis frozen", SOAK),
    47: ("Redis goes back to an older copy", SOAK),
    48: ("PostgreSQL goes back to an older copy", SOAK),
    49: ("descriptors used up", SOAK),
    50: ("memory used up", SOAK),
    51: ("disk of Redis full", SOAK),
}
"""By number as `reliability.md` has them, from 41 on our own: what it is, and what to print where no test here noted it."""


@dataclass
class Outcome:
    """What was seen of one fault: how often, what went wrong, how long until all was well again (`inf`: never)."""

    injected: int = 0
    violations: int = 0
    recovery: list[float] = field(default_factory=list)
    duplicates: int = 0

    def add(self, injected: int, violations: int, recovery: list[float], duplicates: int) -> None:
        """Take in what another test saw of the same fault."""
        self.injected += injected
        self.violations += violations
        self.recovery += recovery
        self.duplicates += duplicates

    def points(self) -> list[str]:
        """Return p50, p95 and greatest recovery in seconds."""
        waits = sorted(self.recovery)
        found = [waits[max(0, ceil(part * len(waits)) - 1)] for part in (0.5, 0.95, 1.0)] if waits else []
        return ["never" if wait == inf else f"{wait:.1f}" for wait in found] or ["", "", ""]


def table(found: dict[int, Outcome]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield _line("fault", "injected", "violations", "p50", "p95", "max", "doubled")
    for number, (name, otherwise) in FAULTS.items():
        title = f"{number:2} {name}"
        if seen := found.get(number):
            yield _line(title, seen.injected, seen.violations, *seen.points(), seen.duplicates)
        else:
            yield f"{title:60} {otherwise}"


def _line(title: str, *cells: object) -> str:
    return f"{title:60} " + " ".join(f"{cell!s:>10}" for cell in cells)
