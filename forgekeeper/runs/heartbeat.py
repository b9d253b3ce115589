"""The heartbeat of runs: one thread of a process that keeps all its rows alive, and what it finds of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import peewee as pw
import structlog
from playhouse.pool import MaxConnectionsExceeded

from forgekeeper.database import database, release
from forgekeeper.runs.ledger import JobRun, Started
from metrics.redaction import describe
from metrics.threads import Vital

log = structlog.get_logger(__name__)


class LostRun(Exception):
    """The run was taken from us: its heartbeat was missing for too long, and another may be at it."""


class Row:
    """The row of a started run: ours until a heartbeat finds it taken, or none has succeeded for *dead_after*."""

    def __init__(self, batch: str, started: Started, *, dead_after: timedelta) -> None:
        self.batch = batch
        self.started = started
        self._dead_after = dead_after.total_seconds()
        self._alive = time.monotonic()
        self._taken = False

    def heard(self, *, ours: bool) -> None:
        """Take note of what a heartbeat found."""
        self._alive = time.monotonic()
        self._taken = self._taken or not ours

    def check(self) -> None:
        """Raise `LostRun` when the run was taken from us, or must be assumed to be."""
        if self._taken or time.monotonic() - self._alive > self._dead_after:
            raise LostRun(f"run {self.started.id} of {self.batch} was taken from attempt {self.started.attempt}")


class Heartbeat(Vital):
    """Says three times in *dead_after* that every run of this process lives, and what it has come to so far."""

    def __init__(self, dead_after: timedelta) -> None:
        super().__init__("heartbeat")
        self._interval = dead_after.total_seconds() / 3
        self._watched: dict[int, tuple[Row, Callable[[], dict[str, Any]]]] = {}

    def watch(self, row: Row, so_far: Callable[[], dict[str, Any]]) -> None:
        """Keep the row alive from now on; an earlier attempt of ours at the same run is lost."""
        earlier = self._watched.get(row.started.id)
        self._watched[row.started.id] = row, so_far
        if earlier is not None:
            earlier[0].heard(ours=False)

    def forget(self, row: Row) -> None:
        """Let the row be; it is closed or lost."""
        watched = self._watched.get(row.started.id)
        if watched is not None and watched[0] is row:
            del self._watched[row.started.id]

    def stop(self) -> None:
        """End the thread."""
        self.stopped.set()

    def work(self) -> None:
        """Beat until stopped; a database that is away costs heartbeats, not the thread."""
        pause = self._interval
        while not self.stopped.wait(pause):
            # After another failure sooner: a run expires with its third heartbeat that is missing.
            pause = self._interval if self.take_turn(self._turn) else self._interval / 3

    def _turn(self) -> None:
        watched = list(self._watched.values())
        if watched:
            self._beat(watched)

    def _beat(self, watched: list[tuple[Row, Callable[[], dict[str, Any]]]]) -> None:
        try:
            database.connect()
            alive = JobRun.keep_alive([row.started for row, _ in watched], [so_far() for _, so_far in watched])
        except (pw.PeeweeException, MaxConnectionsExceeded) as error:
            log.warning("heartbeat failed", error=describe(error))
            return
        finally:
            release()
        for row, _ in watched:
            row.heard(ours=row.started.id in alive)
