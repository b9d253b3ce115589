"""Measure delays caused by a busy machine, so that tests do not count them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from tests.harness.waiting import scale_timeout

PROCESS_GONE_ERRORS = (FileNotFoundError, ProcessLookupError)
RUN_DELAY = 1
"""Index of the field in a thread's schedstat: nanoseconds that the thread was runnable and waited for a processor."""
STEAL = 8


class MachineDelay:
    """Seconds that processes, their descendants and the servers have waited for a processor since this object exists.

    Of each process the thread with the longest wait counts, and the processes are added up: a message passes through
    many processes one after the other, but through few threads of each.  Time that a hypervisor has taken from the
    processors is added.  Idle and sleeping threads do not wait.
    """

    def __init__(self, pids: Callable[[], Iterable[int]], servers: list[int]) -> None:
        """Begin to measure; *pids* returns the current processes, also processes that start later."""
        self._pids, self._servers = pids, servers
        self._before, self._stolen = self._waits(), _stolen()

    def seconds(self) -> float:
        """Return the seconds of delay until now."""
        longest: Counter[int] = Counter()
        for (process, thread), wait in self._waits().items():
            longest[process] = max(longest[process], wait - self._before.get((process, thread), 0))
        return longest.total() / 1e9 + _stolen() - self._stolen

    def over(self, limit: float, seconds: float) -> bool:
        """Return whether *seconds* exceed the *limit* by more than the machine's delay explains."""
        return seconds > limit and seconds > min(limit + self.seconds(), scale_timeout(limit))

    def _waits(self) -> dict[tuple[int, int], int]:
        return dict(_waits([*self._pids(), *self._servers]))


def _waits(pids: Iterable[int]) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield process, thread and nanoseconds of waiting, for each thread of the processes and their descendants."""
    for pid in pids:
        with suppress(*PROCESS_GONE_ERRORS):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with suppress(*PROCESS_GONE_ERRORS):
                    yield (pid, int(thread.name)), int((thread / "schedstat").read_text().split()[RUN_DELAY])
                    yield from _waits(map(int, (thread / "children").read_text().split()))


def _stolen() -> float:
    with Path("/proc/stat").open() as lines:
        return int(lines.readline().split()[STEAL]) / os.sysconf("SC_CLK_TCK")
