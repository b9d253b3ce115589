"""What schedulers have done for a batch, as log lines and as counts."""

from __future__ import annotations

from datetime import datetime

import structlog

from forgekeeper.runs.clock_ahead import Ahead
from forgekeeper.runs.ledger import JobRun, Lost
from metrics.instruments import Instruments

COUNT = Instruments("scheduler")
"""What this process has sent, and what it could not."""

log = structlog.get_logger(__name__)


def reopened(batch: str, lost: Lost) -> None:
    """Report a run whose worker was lost."""
    COUNT.inc("forgekeeper_scheduler_runs_reopened_total", batch)
    log.warning("run taken from a silent worker", batch=batch, **lost._asdict())


def set_aside(batch: str, ahead: Ahead) -> None:
    """Report ticks that were claimed while the database's clock was ahead, if there are any."""
    if ahead.newest is not None:
        newest = ahead.newest.isoformat()
        log.error("ticks set aside, their time has not come", batch=batch, ticks=ahead.ticks, newest=newest)


def enqueued(run: JobRun) -> None:
    """Report a run whose message was sent."""
    COUNT.inc("forgekeeper_scheduler_enqueued_total", run.batch)
    COUNT.mark("forgekeeper_scheduler_last_enqueue_timestamp_seconds", run.batch)
    log.info("run sent", batch=run.batch, run=run.id, tick=run.tick and run.tick.isoformat())


def misfired(batch: str, ticks: int) -> None:
    """Count ticks that nobody claimed in time."""
    COUNT.inc("forgekeeper_scheduler_misfires_total", batch, by=ticks)


def missed(batch: str, ticks: int, *, oldest: datetime) -> None:
    """Report ticks that nobody claimed before the newest was due, if there are any."""
    misfired(batch, ticks)
    if ticks:
        log.warning("ticks missed", batch=batch, ticks=ticks, oldest=oldest.isoformat())


def skipped(batch: str, tick: datetime, *, reason: str, running: bool) -> None:
    """Report a tick that a pause or an open run has turned away.

    A run that waits for a worker is no fault of the timetable, and is not counted; one that is *running* is.
    """
    if running:
        COUNT.inc("forgekeeper_scheduler_max_instances_total", batch)
    log.info("tick skipped", batch=batch, tick=tick.isoformat(), reason=reason)
