"""The time limit of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from forgekeeper.platform import shutdown

MAX_PACE_WAIT_SECONDS = 1.0
"""Longest pause in seconds before a run that waits for its pace looks for a reason to stop."""


class Deadline:
    """The time limit of a run: the end of its budget, or earlier if the run is asked to stop.

    *safe_point* may raise to end the run at once.  A run that is asked to stop, or has a reason to stop, ends as if its
    budget were used up: the next tick deletes the rest.  *done* counts the records that the run has reported;
    *on_progress* is called at each report, before any waiting.
    """

    def __init__(
        self,
        budget: timedelta,
        *,
        clock: Callable[[], float] = time.monotonic,
        safe_point: Callable[[], None] = lambda: None,
        on_progress: Callable[[], None] = lambda: None,
        find_stop_reason: Callable[[], str | None] = lambda: None,
        pace: float | None = None,
    ) -> None:
        self.done = 0
        self._clock = clock
        self._ends = clock() + budget.total_seconds()
        self._safe_point = safe_point
        self._on_progress = on_progress
        self._find_stop_reason = find_stop_reason
        self._pace = pace

    def seconds_left(self) -> float:
        """Return the seconds that are left of the budget."""
        return max(0.0, self._ends - self._clock())

    def has_passed(self, done: int = 0) -> bool:
        """Count *done* records, wait for the pace, and return whether the run has to end."""
        self.done += done
        self._on_progress()
        if self._pace and done:
            self._wait_for_pace(done / self._pace)
        self._safe_point()
        return self.is_halted() or self._clock() >= self._ends

    def is_halted(self) -> bool:
        """Return whether a reason to stop or a shutdown ends the run, whatever is left of its budget."""
        return self._find_stop_reason() is not None or shutdown.requested.is_set()

    def _wait_for_pace(self, seconds: float) -> None:
        """Wait until the time is over, the budget ends or there is a reason to stop."""
        left = min(seconds, self.seconds_left())
        while (
            left > 0
            and self._find_stop_reason() is None
            and not shutdown.requested.wait(min(left, MAX_PACE_WAIT_SECONDS))
        ):
            left -= MAX_PACE_WAIT_SECONDS
