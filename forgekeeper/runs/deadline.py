"""A run's budget, asked at every safe point: between two chunks, outside transactions."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from forgekeeper import shutdown

LOOK = 1.0
"""Seconds that a run waits at a time for its pace."""


class Deadline:
    """When a run has to end: at the end of its budget, or sooner when asked to.

    *safe_point* may raise to end the run at once.  A run that is asked to stop ends as
    if its budget were used up: what is left waits for the next tick.  So does one that a
    *brake* says why to end.  *done* counts what the run has reported; *on_progress* is called when it
    does, before any waiting.
    """

    def __init__(
        self,
        budget: timedelta,
        *,
        clock: Callable[[], float] = time.monotonic,
        safe_point: Callable[[], None] = lambda: None,
        on_progress: Callable[[], None] = lambda: None,
        brake: Callable[[], str | None] = lambda: None,
        pace: float | None = None,
    ) -> None:
        self.done = 0
        self._clock = clock
        self._ends = clock() + budget.total_seconds()
        self._safe_point = safe_point
        self._on_progress = on_progress
        self._brake = brake
        self._pace = pace

    def left(self) -> float:
        """Return the seconds that are left of the budget."""
        return max(0.0, self._ends - self._clock())

    def passed(self, done: int = 0) -> bool:
        """Say whether the run has to end, after the *done* rows or objects of its last chunk.

        Keeps to the pace: waits as long as those may take, but not beyond the budget.
        """
        self.done += done
        self._on_progress()
        if self._pace and done:
            self._wait(done / self._pace)
        self._safe_point()
        return self.halted() or self._clock() >= self._ends

    def halted(self) -> bool:
        """Say whether the run has to end whatever is left of its budget: a brake says so, or it was asked to.

        Asked within what `passed` takes for one chunk and something has to end sooner, or begin.
        """
        return self._brake() is not None or shutdown.requested.is_set()

    def _wait(self, seconds: float) -> None:
        """Wait, but not beyond the budget, nor beyond a brake."""
        left = min(seconds, self.left())
        while left > 0 and self._brake() is None and not shutdown.requested.wait(min(left, LOOK)):
            left -= LOOK
