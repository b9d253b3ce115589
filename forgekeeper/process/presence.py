"""The presence of a process: one thread that says in the ledger's database that it lives, and what it is at."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib import metadata
from threading import get_ident
from typing import Any, NamedTuple

import structlog

from forgekeeper import migrations
from forgekeeper.database import database, release
from forgekeeper.process.rows import Entry, Process
from metrics.redaction import clean, describe
from metrics.threads import Vital

PATIENCE = 2.0
"""Seconds that a process waits at its end until its row is gone; a row that stays is seen to be silent."""
LONGEST_NAME = 200
"""Characters of a message's id: other programs make up their own."""

log = structlog.get_logger(__name__)


class Presence(Vital):
    """Gives signs of life, three times in *dead_after*, each with what *say* returns: columns of the process's row.

    Whatever goes wrong with one costs that one and a line: it is what others see, nothing that the process works on.
    """

    def __init__(self, kind: str, *, dead_after: timedelta, say: Callable[[], dict[str, Any]]) -> None:
        super().__init__("presence")
        self._identity = {"kind": kind, "host": socket.gethostname(), "pid": os.getpid(), "version": version()}
        self._identity["migration"] = migrations.newest()
        self._dead_after = dead_after
        self._say = say
        self._entry: Entry | None = None
        self._woken = threading.Event()

    def wake(self) -> None:
        """Say now what has changed."""
        self._woken.set()

    def stop(self, *, within: float = PATIENCE) -> None:
        """End the thread, and with it the row."""
        self.stopped.set()
        self._woken.set()
        self.join(min(within, PATIENCE))

    def work(self) -> None:
        """Beat until stopped."""
        while not self.stopped.is_set():
            self._reach(self._beat)
            self._woken.wait(self._dead_after.total_seconds() / 3)
            self._woken.clear()
        self._reach(self._withdraw)

    def _beat(self) -> None:
        said, entry = self._say(), self._entry
        if entry is not None and Process.keep_alive(entry, dead_after=self._dead_after, said=said):
            return
        # The first time, or the row is gone: pruned while we were frozen, or not in the backup that was restored.
        started = entry and entry.started_at
        self._entry = Process.enrol(dead_after=self._dead_after, said=said, started_at=started, **self._identity)

    def _withdraw(self) -> None:
        if self._entry is not None:
            Process.withdraw(self._entry)

    def _reach(self, change: Callable[[], None]) -> None:
        try:
            database.connect()
            change()
        except Exception as error:  # noqa: BLE001, as the class says
            log.warning("presence not written", error=describe(error))
        finally:
            release()


class Work(NamedTuple):
    """A message that is worked on; *began* is of the monotonic clock."""

    actor: str
    message_id: str
    run: int | None
    began: float

    def facts(self) -> dict[str, Any]:
        """Say what it is and how long it has taken, for other machines to tell since when by the database's clock."""
        # PostgreSQL's JSON refuses what a message's id may be: then the process would seem to be silent.
        name = self.message_id.replace("\0", "\\x00").encode(errors="backslashreplace").decode()
        seconds = round(time.monotonic() - self.began, 3)
        return {"what": self.actor, "message_id": name, "run": self.run, "seconds": seconds}


class AtWork:
    """What the threads of this process are at."""

    def __init__(self) -> None:
        self._by_thread: dict[int, Work] = {}

    def begin(self, actor: str, message_id: str, *, run: int | None) -> None:
        """Note that this thread works on a message from now on."""
        # A row keeps no NUL, and is written every few seconds.
        self._by_thread[get_ident()] = Work(actor, clean(message_id)[:LONGEST_NAME], run, time.monotonic())

    def end(self) -> None:
        """Note that this thread works on nothing."""
        self._by_thread.pop(get_ident(), None)

    def overdue(self, limits: Mapping[str, float]) -> list[str]:
        """Name the messages that are worked on for longer than their actors' *limits*, in seconds, allow."""
        now = time.monotonic()
        works = list(self._by_thread.values())
        return [work.message_id for work in works if now - work.began > limits.get(work.actor, math.inf)]

    def facts(self) -> list[dict[str, Any]]:
        """Say what everybody is at, the longest first."""
        return [work.facts() for work in sorted(self._by_thread.values(), key=lambda work: work.began)]


def version() -> str:
    """Return the version of forgekeeper that runs here."""
    try:
        return metadata.version("forgekeeper")
    except metadata.PackageNotFoundError:
        return "source"  # a checkout that is not installed
