"""A look at something that may never answer: in a thread of its own, waited for only so long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import structlog

from metrics.redaction import describe

log = structlog.get_logger(__name__)
Answer = TypeVar("Answer")


class Probe(Generic[Answer]):
    """Something that is asked in a thread of its own, which may never come back; it is asked once at a time."""

    def __init__(self, name: str, ask: Callable[[], Answer]) -> None:
        self.name = name
        self.seconds = 0.0
        self._answer: Answer | None = None
        self._ask = ask
        self._began = 0.0
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Ask, unless an earlier asking has not come back, or no thread can be had now."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._answer, self._began, self.seconds, self._thread = None, time.monotonic(), 0.0, None
        thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError as error:
            log.warning("collector failed", collector=self.name, error=describe(error))

    def wait(self, until: float) -> Answer | None:
        """Return the answer, None when there is none by *until*, an instant of the monotonic clock."""
        if self._thread is not None:
            self._thread.join(max(0.0, until - time.monotonic()))
            if self._thread.is_alive():
                self.seconds = time.monotonic() - self._began
                log.warning("collector not back", collector=self.name, seconds=round(self.seconds, 3))
        return self._answer

    def _run(self) -> None:
        try:
            self._answer = self._ask()
        except Exception as error:  # noqa: BLE001, whatever is wrong here, the other collectors go on
            log.warning("collector failed", collector=self.name, error=describe(error))
        self.seconds = time.monotonic() - self._began
