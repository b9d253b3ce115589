"""The heart of a process: one thread that keeps all its runs alive."""

from __future__ import annotations

from datetime import timedelta

import peewee as pw
import structlog
from playhouse.pool import MaxConnectionsExceeded

from forgekeeper.database import database, promptly, release
from forgekeeper.runs.attempt import Attempt
from forgekeeper.runs.ledger import JobRun
from metrics.redaction import describe
from metrics.threads import Vital

log = structlog.get_logger(__name__)


class Heart(Vital):
    """Says three times in *dead_after* that every attempt of this process lives, and what it has come to so far."""

    def __init__(self, dead_after: timedelta) -> None:
        super().__init__("heart")
        self._interval = dead_after.total_seconds() / 3
        self._attempts: dict[int, Attempt] = {}

    def watch(self, attempt: Attempt) -> None:
        """Keep the attempt alive from now on; an earlier one of ours at the same run is lost."""
        earlier = self._attempts.get(attempt.run.id)
        self._attempts[attempt.run.id] = attempt
        if earlier is not None:
            earlier.sign_of_life(ours=False)

    def forget(self, attempt: Attempt) -> None:
        """Let the attempt be; it is closed or lost."""
        if self._attempts.get(attempt.run.id) is attempt:
            del self._attempts[attempt.run.id]

    def stop(self) -> None:
        """End the thread."""
        self.stopped.set()

    def work(self) -> None:
        """Beat until stopped; a database that is away costs beats, not the thread."""
        pause = self._interval
        while not self.stopped.wait(pause):
            # After another failure sooner: there are three beats in what a run may be silent for.
            pause = self._interval if self.take_turn(self._turn) else self._interval / 3

    def _turn(self) -> None:
        attempts = list(self._attempts.values())
        if attempts:
            self._beat(attempts)

    def _beat(self, attempts: list[Attempt]) -> None:
        try:
            database.connect()
            with promptly():
                alive = JobRun.keep_alive([each.run for each in attempts], [each.result() for each in attempts])
        except (pw.PeeweeException, MaxConnectionsExceeded) as error:
            log.warning("heartbeat failed", error=describe(error))
            return
        finally:
            release()
        for attempt in attempts:
            attempt.sign_of_life(ours=attempt.run.id in alive)
