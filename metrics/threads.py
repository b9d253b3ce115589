"""Threads that a process cannot do without: when one ends, for whatever reason, so does its process.

A thread that has died leaves no trace: its process looks alive, and something that it should do is not done any more.
So what goes wrong in one turn costs that turn, and a line; what goes wrong three turns in a row, or outside of any,
ends the thread, and the thread the process.  Its supervisor starts it again.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial

import structlog

FAILURES = 3
"""So many turns in a row that fail are not chance: whatever the thread is for, it does not do it."""
START = 10.0
"""Seconds in which a thread that was started runs, also on a machine that is very busy."""
LAST_RESORT = 60
"""Seconds that a process without such a thread has to end in an orderly way, before the kernel ends it."""

log = structlog.get_logger(__name__)
_why: list[str] = []


def end_process(reason: str, **facts: object) -> None:
    """Let this process end as if it had been asked to, and say why; where it does not, the kernel ends it."""
    _why.append(reason)
    try:
        log.critical("process ends itself", reason=reason, **facts)
    finally:
        # Neither needs memory or a thread, of which there may be none left; nothing of ours waits for an alarm.
        signal.alarm(LAST_RESORT)
        os.kill(os.getpid(), signal.SIGTERM)


def ended_itself() -> bool:
    """Say whether this process was asked to end by itself."""
    return bool(_why)


class Thread(threading.Thread):
    """A daemon whose start ends: `start` raises `RuntimeError` where it does not run after *timeout* seconds.

    Without memory a thread may die before it says that it runs, and `threading` waits for that for ever, deaf even to
    time limits (CPython's issue 140746).
    """

    def __init__(
        self, target: Callable[[], object] | None = None, name: str | None = None, *, timeout: float = START
    ) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._said: threading.Event = self._started  # type: ignore[attr-defined]
        self._said.wait = partial(self._said.wait, timeout)

    def start(self) -> None:
        """Start it."""
        super().start()
        if not self._said.is_set():
            raise RuntimeError(f"can't start new thread: {self.name} does not say that it runs")


class Vital(Thread):
    """A thread that its process cannot do without, at `work` until `stopped` is set."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.stopped = threading.Event()
        self._failures = 0

    def run(self) -> None:
        """Work; where that ends though nobody has stopped it, end the process."""
        error: BaseException | None = None
        try:
            self.work()
        except BaseException as raised:  # noqa: BLE001, there is nobody behind us who would hear of it
            error = raised
        if not self.stopped.is_set():
            self.broken(error)

    def work(self) -> None:
        """Do what the thread is for, until `stopped` is set."""
        raise NotImplementedError

    def take_turn(self, turn: Callable[[], None]) -> bool:
        """Take a turn; one that fails is said and returns False, but too many in a row end the thread."""
        try:
            turn()
        except Exception as error:
            self._failures += 1
            if self._failures >= FAILURES:
                raise
            log.warning("turn failed", thread=self.name, exc_info=error)
            return False
        self._failures = 0
        return True

    def broken(self, error: BaseException | None) -> None:
        """End the process, whose thread this was."""
        end_process(f"its thread {self.name!r} has ended", exc_info=error)


class Rounds(Vital):
    """Takes a *turn* every *interval* seconds, in a thread of its own: it waits for no other's server."""

    def __init__(self, name: str, turn: Callable[[], None], *, interval: float) -> None:
        super().__init__(name)
        self._turn = turn
        self._interval = interval

    def work(self) -> None:
        """Take turns until stopped."""
        while not self.stopped.wait(self._interval):
            self.take_turn(self._turn)
