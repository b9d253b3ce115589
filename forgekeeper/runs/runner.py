"""Start a run, keep it alive, close it: what a worker's middleware and `forgekeeper run` share."""

from __future__ import annotations

from uuid import UUID

import structlog

from forgekeeper.events import RunEnded, RunSkipped, RunStarted, emit
from forgekeeper.failpoints import arm, failpoint
from forgekeeper.identity import identity
from forgekeeper.runs.attempt import Attempt
from forgekeeper.runs.batch import Batch
from forgekeeper.runs.heartbeat import Heart
from forgekeeper.runs.ledger import JobRun, Started
from forgekeeper.settings import Settings

log = structlog.get_logger(__name__)


class Runner:
    """Makes the attempts of one process; it owns the thread that keeps them alive."""

    def __init__(self, settings: Settings) -> None:
        arm(settings.failpoints)
        self._settings = settings
        self._heart = Heart(settings.dead_after)
        self._heart.start()

    def stop(self) -> None:
        """End the heart; attempts that are still open will be found dead."""
        self._heart.stop()

    def start(self, batch: str, run_id: int, *, token: UUID) -> Attempt | None:
        """Start the run of that number and token; None when there is none to start, or the batch is paused."""
        run = JobRun.start(batch, run_id, token=token, by=identity())
        if run is None:
            paused = Batch.paused(batch).exists()
            # A paused batch's row stays open; its message is sent again after the pause.
            reason = "paused" if paused else "duplicate"
            emit(RunSkipped(batch, reason))
            log.info("run skipped", batch=batch, run=run_id, reason=reason)
            return None
        emit(RunStarted(batch, run.tick, run.attempt))
        return self.begin(batch, run)

    def begin(self, batch: str, run: Started) -> Attempt:
        """Make this thread's attempt at a run that has been started."""
        attempt = Attempt(batch, run, self._settings)
        attempt.enter()
        self._heart.watch(attempt)
        return attempt

    def close(self, attempt: Attempt, error: BaseException | None, *, final: bool = False) -> str | None:
        """Close the attempt; return the row's new state, None when it was taken from us.

        An error leads to a retry, unless it is *final*.
        """
        state: str | None = None
        try:
            if error is not None:
                state = attempt.fail(error, final=final)
            else:
                state = attempt.succeed()
                failpoint("run.closed")
            return state
        finally:
            self._heart.forget(attempt)
            attempt.count()
            facts = attempt.batch, attempt.seconds(), attempt.outcome, error
            emit(RunEnded(*facts, state, attempt.why_skipped()))
            attempt.leave()
