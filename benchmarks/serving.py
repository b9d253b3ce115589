"""A scheduler and a worker, ours and bare ones, inside a context."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Generic, TypeVar

from benchmarks.processes import ROOT, environment, until
from forgekeeper.platform.database import database
from forgekeeper.platform.settings import Settings

WORKER = ("--processes", "1", "--threads", "8")
READY = "select count(distinct kind) from processes"


Measured = TypeVar("Measured")


class Shared(Generic[Measured]):
    """A measurement shared by several figures: each round is measured once, on first request."""

    def __init__(self, measure: Callable[[], Measured]) -> None:
        self._measure = measure
        self._found: list[Measured] = []

    def figure(self, take: Callable[[Measured], float]) -> Callable[[], float]:
        """Return a function that returns *take* of one round after another."""
        rounds = count()

        def of_next_round() -> float:
            number = next(rounds)
            if number == len(self._found):
                self._found.append(self._measure())
            return take(self._found[number])

        return of_next_round


@contextmanager
def ours(settings: Settings, **options: object) -> Iterator[list[int]]:
    """Run `forgekeeper scheduler` and `forgekeeper worker`; yield their ids when ready.

    This process must be connected to their database.
    """
    given = environment(settings, **options) | {"PYTHONPATH": str(ROOT)}
    with ExitStack() as stack:
        started: list[int] = []
        # One after the other: if both start at once, one waits for the other's first tick.
        for arguments in (("worker", *WORKER), ("scheduler",)):
            started.append(stack.enter_context(_process("forgekeeper.cli", *arguments, env=given)))
            until(lambda: database.execute_sql(READY).fetchone()[0] == len(started), within=60)
        yield started


@contextmanager
def bare(redis_url: str, timetable: Mapping[str, str]) -> Iterator[list[int]]:
    """Run plain Dramatiq and APScheduler with these jobs; yield their ids."""
    with ExitStack() as stack:
        arguments = (("work", redis_url, *WORKER), ("schedule", redis_url, json.dumps(timetable)))
        yield [stack.enter_context(_process("benchmarks.bare", *each)) for each in arguments]


@contextmanager
def _process(module: str, *arguments: str, env: dict[str, str] | None = None) -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=env,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait()
