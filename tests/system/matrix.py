"""The fault matrix: what is broken on purpose, and the table that says how it went.

A test that injects a fault says so with the fixture `outcome`; `make test-system` ends with
the table.  A fault that is tested elsewhere, or that cannot be injected, is listed with
where or why, so that none is forgotten in silence.
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
ELSEWHERE = {
    12: "tests/settings/test_cron.py, tests/test_layers.py: schedules are kept in UTC, by the database's clock",
    27: "tests/workers/test_user_status_cleanup.py::test_locked_rows_make_a_run_neither_wait_nor_search_again_and_again",
    28: "tests/workers/test_user_status_cleanup.py, test_stale_imports_races.py, test_expired_job_artifacts.py",
    31: "tests/workers/test_delete_objects.py, tests/workers/test_stale_direct_uploads.py",
    32: "tests/workers/test_uploads_machine.py",
    34: "tests/storage/test_git_refs.py, tests/storage/test_git_refs_locks.py",
    35: "tests/workers/test_git_ref_crashes.py::test_a_git_that_hangs_is_ended_at_the_deadline_and_costs_no_row",
    38: "tests/storage/test_objects_in_folders.py::test_a_forked_child_is_told_instead_of_left_hanging",
    6: "tests/delivery/test_messages_in_workers.py",
    21: "tests/delivery/test_messages_in_workers.py",
    23: "tests/delivery/test_messages_in_workers.py",
    41: "tests/delivery/test_messages_in_workers.py",
    **dict.fromkeys((8, 9, 13, 14, 15, 16, 18, 19, 20, 22, 24, 25, 26, 33, 44, *range(45, 52)), SOAK),
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

    def cells(self) -> tuple[str, ...]:
        """Return injected, violations, p50, p95 and greatest recovery in seconds, duplicates."""
        waits = sorted(self.recovery)
        points = (_seconds(_quantile(waits, part)) for part in (0.5, 0.95, 1.0)) if waits else ("", "", "")
        return str(self.injected), str(self.violations), *points, str(self.duplicates)


def _quantile(waits: list[float], part: float) -> float:
    return waits[max(0, ceil(part * len(waits)) - 1)]


def _seconds(value: float) -> str:
    return "never" if value == inf else f"{value:.1f}"


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
    yield f"{'fault':60} {'injected':>8} {'violations':>10} {'p50':>6} {'p95':>6} {'max':>6} {'doubled':>7}"
    for number, name in FAULTS.items():
        title = f"{number:2} {name}"
        if (number, "") in found:
            yield _line(title, found[number, ""])
        elif number in elsewhere:
            yield f"{title:60} see {elsewhere[number]}"
        else:
            yield f"{title:60} not run"
        if (number, STOCK) in found:
            yield _line("   the unmodified libraries", found[number, STOCK])


def _line(title: str, outcome: Outcome) -> str:
    injected, violations, *waits, duplicates = outcome.cells()
    return (
        f"{title:60} {injected:>8} {violations:>10} " + " ".join(f"{wait:>6}" for wait in waits) + f" {duplicates:>7}"
    )
