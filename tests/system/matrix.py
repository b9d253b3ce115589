"""The fault matrix: what is broken on purpose, and the table that says how it went.

A test that injects a fault says so with the fixture `outcome`; `make test-system` ends with the table.  A fault that is
tested elsewhere is listed with where, so that none is forgotten in silence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import ceil, inf

FAULTS = {
    1: "worker process killed in a batch",
    2: "killed between commit and acknowledgement",
    3: "killed between git and the table",
    4: "killed between object and its row",
    5: "master alone killed",
    6: "SIGTERM to the master or to the whole group",
    7: "worker stopped for longer than its lease",
    8: "scheduler stopped for a while",
    9: "schedulers started together, and one after another",
    10: "scheduler killed between claim and send",
    11: "a clock an hour fast, or set back",
    12: "change to or from summer time",
    13: "Redis emptied",
    14: "Redis killed, with its log kept",
    15: "Redis refuses connections",
    16: "reply of Redis lost after execution",
    17: "Redis a black hole",
    18: "Redis out of memory",
    19: "Redis read-only for a while",
    20: "scripts of Redis flushed",
    21: "actor fails while Redis is away",
    22: "time limit meets a Redis that stalls",
    23: "poison message",
    24: "PostgreSQL sessions terminated",
    25: "PostgreSQL restarted",
    26: "PostgreSQL a black hole in a query",
    27: "rows locked by somebody else",
    28: "users change what is being cleaned up",
    29: "a snapshot pinned while much is deleted",
    30: "no connections left",
    31: "object store fails for some keys",
    32: "upload completed while it is cleaned up",
    33: "store or repositories not mounted",
    34: "git: locks, conflicts, broken and missing repositories",
    35: "git hangs",
    36: "pushes beside the cleanup",
    37: "disk full",
    38: "store used after a fork",
    39: "metrics cannot be written",
    40: "ten times the load",
    41: "a message prefetched by a worker that is told to end",
    42: "cron message beside full queues",
    43: "everything at once",
    44: "schedulers killed",
    45: "PostgreSQL frozen",
    46: "Redis frozen",
    47: "Redis goes back to an older copy",
    48: "PostgreSQL goes back to an older copy",
    49: "descriptors used up",
    50: "memory used up",
    51: "disk of Redis full",
}
"""By number as `reliability.md` has them; from 41 on our own."""

SOAK = "tests/system/soak/test_soak.py"
MESSAGES = "tests/delivery/test_messages_in_workers.py"
ELSEWHERE = {
    11: "tests/runs/test_clock_ahead.py, test_reconcile.py, test_clocks.py",
    12: "tests/settings/test_cron.py: schedules are kept in UTC, by the database's clock",
    27: "tests/workers/test_user_status_cleanup.py",
    28: "tests/workers/test_user_status_cleanup.py, test_stale_imports.py, test_expired_job_artifacts.py",
    29: "tests/workers/test_user_status_cleanup.py: each chunk is looked for behind the last one",
    31: "tests/workers/test_delete_objects.py, test_stale_direct_uploads.py",
    32: "tests/workers/test_uploads_machine.py",
    34: "tests/storage/test_git_refs.py, test_git_refs_locks.py",
    35: "tests/workers/test_git_ref_crashes.py",
    36: "tests/storage/test_git_refs_locks.py",
    38: "tests/storage/test_objects_in_folders.py",
    40: "benchmarks",
    42: "tests/demo/test_up.py: queues of long children have workers of their own",
    **dict.fromkeys((5, 6, 21, 41), MESSAGES),
    **dict.fromkeys((7, 8, 9, *range(13, 21), 22, 24, 25, 26, 30, 33, *range(44, 52)), SOAK),
}
"""Where a fault is tested that no test notes with `outcome`."""

STOCK = "stock"


@dataclass
class Outcome:
    """What was seen of one fault: how often, what went wrong, how long until all was well again."""

    injected: int = 0
    violations: int = 0
    recovery: list[float] = field(default_factory=list)
    duplicates: int = 0

    def add(self, other: Outcome) -> None:
        """Take in what another test saw of the same fault."""
        self.injected += other.injected
        self.violations += other.violations
        self.recovery += other.recovery
        self.duplicates += other.duplicates

    def points(self) -> list[str]:
        """Return p50, p95 and greatest recovery in seconds."""
        waits = sorted(self.recovery)
        found = [waits[max(0, ceil(part * len(waits)) - 1)] for part in (0.5, 0.95, 1.0)] if waits else []
        return ["never" if wait == inf else f"{wait:.1f}" for wait in found] or ["", "", ""]


def gathered(properties: Iterable[tuple[str, object]]) -> dict[tuple[int, str], Outcome]:
    """Add up the outcomes in the tests' properties, by fault and by whose they are: ours or `STOCK`."""
    found: dict[tuple[int, str], Outcome] = defaultdict(Outcome)
    for name, value in properties:
        if name == "outcome":
            fault, whose, outcome = value
            found[fault, whose].add(Outcome(**outcome))
    return found


def table(found: dict[tuple[int, str], Outcome], elsewhere: dict[int, str]) -> Iterator[str]:
    """Yield the lines of the table: each fault, ours, and below it the unmodified libraries where they ran it."""
    yield _line("fault", "injected", "violations", "p50", "p95", "max", "doubled")
    for number, name in FAULTS.items():
        title = f"{number:2} {name}"
        if (number, "") in found:
            yield row(title, found[number, ""])
        else:
            yield f"{title:60} {f'see {elsewhere[number]}' if number in elsewhere else 'not run'}"
        if (number, STOCK) in found:
            yield row("   the unmodified libraries", found[number, STOCK])


def row(title: str, seen: Outcome) -> str:
    """Return a line of the table."""
    return _line(title, seen.injected, seen.violations, *seen.points(), seen.duplicates)


def _line(title: str, *cells: object) -> str:
    return f"{title:60} " + " ".join(f"{cell!s:>10}" for cell in cells)
