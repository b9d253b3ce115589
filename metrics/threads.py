"""Threads that a process cannot do without: when one ends, for whatever reason, so does its process.

A thread that has died leaves no trace: its process looks alive, and something that it should do is not done any more.
So what goes wrong in one turn costs that turn, and a line; what goes wrong three turns in a row, or outside of any,
ends the thread, and the thread the process.  Its supervisor starts it again.

A `Probe` is a thread that may hang or fail: its process goes on without the answer.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from types import FrameType
from typing import Any

import structlog

from metrics.logs import describe

FAILURES = 3
"""So many turns in a row that fail are not chance: whatever the thread is for, it does not do it."""
START = 10.0
"""Seconds in which a thread that was started runs, also on a machine that is very busy."""
LAST_RESORT = 60
"""Seconds that a process without such a thread has to end in an orderly way, before the kernel ends it."""

STALLED_AFTER_SECONDS = 60.0
"""Longest turn of a loop that does not wait for a server: turns take milliseconds."""
SERVER_CLIENTS = {"peewee", "psycopg2", "redis"}
"""Packages that wait for servers.  A loop in one of them stands still because its server does."""

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
        self.turn_began: float | None = None
        """When its present turn began, by the monotonic clock; None between two turns."""
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
        self.turn_began = monotonic()
        try:
            turn()
        except Exception as error:
            self._failures += 1
            if self._failures >= FAILURES:
                raise
            log.warning("turn failed", thread=self.name, exc_info=error)
            return False
        finally:
            self.turn_began = None
        self._failures = 0
        return True

    def broken(self, error: BaseException | None) -> None:
        """End the process, whose thread this was."""
        end_process(f"its thread {self.name!r} has ended", exc_info=error)


def find_stalled() -> str | None:
    """Say which loop of this process stands still; None if none does.

    A loop that waits for PostgreSQL or Redis does not count, however long it waits: to restart its process would not
    help.  Asks no server and takes no lock.
    """
    frames = sys._current_frames()  # noqa: SLF001, the only way to see what another thread waits for
    for thread in threading.enumerate():
        began = thread.turn_began if isinstance(thread, Vital) else None
        if began is None or monotonic() - began < STALLED_AFTER_SECONDS:
            continue
        if not _waits_for_server(frames.get(thread.ident or 0)):
            return f"its loop {thread.name!r} has been at one turn for {monotonic() - began:.0f} s"
    return None


def _waits_for_server(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in SERVER_CLIENTS:
            return True
        frame = frame.f_back
    return False


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


class Probe:
    """Calls *ask* in a thread of its own, one call at a time. A call that hangs holds up nobody else."""

    def __init__(self, name: str, ask: Callable[[], Any]) -> None:
        self.name = name
        self.seconds = self._began = 0.0
        self._answer: Any = None
        self._ask = ask
        self._thread = threading.Thread()

    def begin(self) -> None:
        """Start a call, unless an earlier call still hangs."""
        if not self._thread.is_alive():
            self._answer, self._began = None, monotonic()
            self._thread = Thread(self._run, self.name)
            self._thread.start()

    def wait(self, until: float) -> Any:
        """Return the answer, or None if there is none by *until*, an instant of the monotonic clock."""
        self._thread.join(max(0.0, until - monotonic()))
        if self._thread.is_alive():
            self.seconds = monotonic() - self._began
            log.warning("collector not back", collector=self.name, seconds=round(self.seconds, 3))
        return self._answer

    def _run(self) -> None:
        try:
            self._answer = self._ask()
        except Exception as error:  # noqa: BLE001, the other probes still answer
            log.warning("collector failed", collector=self.name, error=describe(error))
        self.seconds = monotonic() - self._began


def asked(probes: Sequence[Probe], seconds: float) -> list[Any]:
    """Call all probes at once; return the answer of each, or None if it fails or takes longer than *seconds*."""
    until = monotonic() + seconds
    for probe in probes:
        probe.begin()
    return [probe.wait(until) for probe in probes]
