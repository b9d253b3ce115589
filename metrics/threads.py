"""Vital threads: if such a thread ends for any reason, its process ends.

A thread that dies leaves no trace: its process looks alive, but part of its work is not done any more. Therefore an
error in one turn costs only that turn and a log line. Errors in three turns in a row, or outside of a turn, end the
thread, and the thread ends the process. The supervisor restarts the process.

A `Probe` is a thread that may hang or fail: its process continues without the answer.
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

from metrics.logs import describe_error

MAX_FAILED_TURNS = 3
"""Consecutive failed turns that end the thread; fewer may be a coincidence."""
THREAD_START_SECONDS = 10.0
"""Seconds within which a started thread must run, also on a very busy machine."""
FORCED_EXIT_SECONDS = 60
"""Seconds for an orderly shutdown without a vital thread, before the kernel kills us."""

STALLED_AFTER_SECONDS = 60.0
"""Longest turn of a loop in seconds, without waits for servers; turns take milliseconds."""
SERVER_CLIENTS = {"peewee", "psycopg2", "redis"}
"""Packages that wait for servers. A loop inside them is blocked by its server."""

log = structlog.get_logger(__name__)
_end_reasons: list[str] = []


def end_process(reason: str, **facts: object) -> None:
    """Send SIGTERM to this process and log the reason; a timer kills the process if it hangs."""
    _end_reasons.append(reason)
    try:
        log.critical("process ends itself", reason=reason, **facts)
    finally:
        # Neither needs memory or a thread, which may be exhausted. None of our code uses SIGALRM.
        signal.alarm(FORCED_EXIT_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)


def ended_itself() -> bool:
    """Check whether this process has ended itself."""
    return bool(_end_reasons)


class DaemonThread(threading.Thread):
    """A daemon thread whose `start` raises `RuntimeError` if it does not run in time.

    *timeout* is in seconds. Without memory a thread may die before it reports that it runs; `threading` would wait for
    the report for ever, without regard to time limits (CPython's issue 140746).
    """

    def __init__(
        self,
        target: Callable[[], object] | None = None,
        name: str | None = None,
        *,
        timeout: float = THREAD_START_SECONDS,
    ) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._started_event: threading.Event = self._started  # type: ignore[attr-defined]
        self._started_event.wait = partial(self._started_event.wait, timeout)

    def start(self) -> None:
        """Start the thread."""
        super().start()
        if not self._started_event.is_set():
            raise RuntimeError(f"can't start new thread: {self.name} did not report that it runs")


class CriticalThread(DaemonThread):
    """A thread that its process needs; it is at `work` until `stopped` is set."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.stopped = threading.Event()
        self.turn_began: float | None = None
        """Start of the current turn by the monotonic clock; None between turns."""
        self._failures = 0

    def run(self) -> None:
        """Work; if that ends before `stopped` is set, end the process."""
        error: BaseException | None = None
        try:
            self.run_until_stopped()
        except BaseException as raised:  # noqa: BLE001, there is nobody behind us who would hear of it
            error = raised
        if not self.stopped.is_set():
            self.handle_early_end(error)

    def run_until_stopped(self) -> None:
        """Do the work of the thread until `stopped` is set."""
        raise NotImplementedError

    def take_turn(self, turn: Callable[[], None]) -> bool:
        """Run a turn; log an error and return False, but raise it after too many in a row."""
        self.turn_began = monotonic()
        try:
            turn()
        except Exception as error:
            self._failures += 1
            if self._failures >= MAX_FAILED_TURNS:
                raise
            log.warning("turn failed", thread=self.name, exc_info=error)
            return False
        finally:
            self.turn_began = None
        self._failures = 0
        return True

    def handle_early_end(self, error: BaseException | None) -> None:
        """End the process."""
        end_process(f"the thread {self.name!r} ended", exc_info=error)


def find_stalled() -> str | None:
    """Return which loop of this process has stalled; None if none has.

    A loop that waits for PostgreSQL or Redis does not count, no matter how long: restarting its process would not help.
    The check asks no server and takes no lock.
    """
    frames = sys._current_frames()  # noqa: SLF001, the only way to see what another thread waits for
    for thread in threading.enumerate():
        began = thread.turn_began if isinstance(thread, CriticalThread) else None
        if began is None or monotonic() - began < STALLED_AFTER_SECONDS:
            continue
        if not _waits_for_server(frames.get(thread.ident or 0)):
            return f"the loop {thread.name!r} has not finished its turn for {monotonic() - began:.0f} s"
    return None


def _waits_for_server(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in SERVER_CLIENTS:
            return True
        frame = frame.f_back
    return False


class PeriodicThread(CriticalThread):
    """Runs *turn* every *interval* seconds in its own thread, independent of other loops."""

    def __init__(self, name: str, turn: Callable[[], None], *, interval: float) -> None:
        super().__init__(name)
        self._turn = turn
        self._interval = interval

    def run_until_stopped(self) -> None:
        """Run turns until stopped."""
        while not self.stopped.wait(self._interval):
            self.take_turn(self._turn)


class Probe:
    """Calls *ask* in its own thread, one call at a time; a call that hangs delays nobody else."""

    def __init__(self, name: str, ask: Callable[[], Any]) -> None:
        self.name = name
        self.seconds = self._began = 0.0
        self._answer: Any = None
        self._ask = ask
        self._thread = threading.Thread()

    def start_call(self) -> None:
        """Start a call, unless an earlier call still hangs."""
        if not self._thread.is_alive():
            self._answer, self._began = None, monotonic()
            self._thread = DaemonThread(self._run_call, self.name)
            self._thread.start()

    def wait_for_answer(self, until: float) -> Any:
        """Return the answer, or None after *until*, an instant of the monotonic clock."""
        self._thread.join(max(0.0, until - monotonic()))
        if self._thread.is_alive():
            self.seconds = monotonic() - self._began
            log.warning("collector timed out", collector=self.name, seconds=round(self.seconds, 3))
        return self._answer

    def _run_call(self) -> None:
        try:
            self._answer = self._ask()
        except Exception as error:  # noqa: BLE001, the other probes still answer
            log.warning("collector failed", collector=self.name, error=describe_error(error))
        self.seconds = monotonic() - self._began


def ask_probes(probes: Sequence[Probe], seconds: float) -> list[Any]:
    """Call all probes at once; return each answer, or None if it fails or exceeds *seconds*."""
    until = monotonic() + seconds
    for probe in probes:
        probe.start_call()
    return [probe.wait_for_answer(until) for probe in probes]
