"""Time and the end of a process, as a test wants them."""


class Clock:
    """A monotonic clock that goes on by *step* each time it is looked at."""

    def __init__(self, step):
        self._step = step
        self._seconds = 0.0

    def __call__(self):
        self._seconds += self._step
        return self._seconds


class StandingClock:
    """A monotonic clock that stands still until `go_on` lets a *budget* pass."""

    def __init__(self, budget):
        self._budget = budget.total_seconds()
        self._seconds = 0.0

    def __call__(self):
        return self._seconds

    def go_on(self):
        self._seconds += self._budget


class Crash(Exception):
    """The end of a process, as far as a run or a child can tell."""


def crash():
    raise Crash
