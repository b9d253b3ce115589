"""How busy the machine is: what a test must not hold against what it tests."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from tests.harness.waiting import scale_timeout

PROCESS_GONE_ERRORS = (FileNotFoundError, ProcessLookupError)
RUN_DELAY = 1
"""The field of a thread's schedstat that says for how many nanoseconds it could have run and had to wait."""
STEAL = 8


class MachineDelay:
    """For how long the machine has held up processes, what they have started, and the servers, since this was made.

    Of each process the thread counts that has waited longest for a processor: a message goes through many processes
    one after the other, and they are added up, but in each through few threads.  The time for which a hypervisor
    took the processors away is added, too.  What is idle or asleep does not wait.
    """

    def __init__(self, pids: Callable[[], Iterable[int]], servers: list[int]) -> None:
        """Begin; *pids* names the processes, also those that have been started since."""
        self._pids, self._servers = pids, servers
        self._before, self._stolen = self._waits(), _stolen()

    def seconds(self) -> float:
        """Say for how long, until now."""
        longest: Counter[int] = Counter()
        for (process, thread), wait in self._waits().items():
            longest[process] = max(longest[process], wait - self._before.get((process, thread), 0))
        return longest.total() / 1e9 + _stolen() - self._stolen

    def over(self, limit: float, seconds: float) -> bool:
        """Say whether *seconds* since then are more than the *limit*, as this machine has held it up."""
        return seconds > limit and seconds > min(limit + self.seconds(), scale_timeout(limit))

    def _waits(self) -> dict[tuple[int, int], int]:
        return dict(_waits([*self._pids(), *self._servers]))


def _waits(pids: Iterable[int]) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield those processes and their descendants with each of their threads, and for how long it has waited."""
    for pid in pids:
        with suppress(*PROCESS_GONE_ERRORS):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with suppress(*PROCESS_GONE_ERRORS):
                    yield (pid, int(thread.name)), int((thread / "schedstat").read_text().split()[RUN_DELAY])
                    yield from _waits(map(int, (thread / "children").read_text().split()))


def _stolen() -> float:
    with Path("/proc/stat").open() as lines:
        return int(lines.readline().split()[STEAL]) / os.sysconf("SC_CLK_TCK")
