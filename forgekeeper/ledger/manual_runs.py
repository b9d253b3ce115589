"""Manual runs: a person sends or cancels them through the ledger.

Each is one run, shown and retried.
"""

from __future__ import annotations

import peewee as pw

from forgekeeper.api.batches import BatchSpec, NotSent
from forgekeeper.audit import acts
from forgekeeper.ledger import reconcile
from forgekeeper.ledger.holds import Hold
from forgekeeper.ledger.job_runs import OPEN_STATES, JobRun
from forgekeeper.platform.connections import process_identity
from forgekeeper.platform.database import database
from metrics.logs import clean_input


def claim_run(batch: BatchSpec) -> int | None:
    """Claim a manual run, or end the wait of the run that waits for its retry, and audit it.

    Returns None if another run is open.
    """
    with database.atomic():
        run = JobRun.claim_manual(batch.name, by=process_identity()) or JobRun.retry_now(batch.name)
        if run is not None:
            acts.record_act("send", f"run {run}", batch=batch.name, after={"run": run})
    return run


def send_run(batch: BatchSpec, deliver: reconcile.Deliver) -> JobRun:
    """Send a new run of the batch, or its open run; return it.

    Needs connections.  Raises `NotSent` if no run may start.
    """
    if why := Hold.find_state(batch.name):
        raise NotSent(f"{batch.name} is {why}; `forgekeeper why {batch.name}` says by whom")
    claim_run(batch)
    run = JobRun.find_open(batch.name)
    if run is None:
        raise NotSent(f"{batch.name} was busy a moment ago; try again")
    reconcile.send_open_run(batch.name, deliver)
    return run


def cancel_run(number: int, *, reason: str | None, by: str) -> str | None:
    """Cancel a run and its children.

    A waiting run is closed; a started run and its children end before their next chunk.  Returns the state of the run
    after that, None if it has already ended; its children then still end early.
    """
    now, started = pw.fn.clock_timestamp(), JobRun.state == "started"
    values = {"cancelled_at": now, "cancelled_reason": reason and clean_input(reason), "cancelled_by": clean_input(by)}
    closed = {
        "state": pw.Case(None, [(started, JobRun.state)], "skipped"),
        "reason": pw.Case(None, [(started, JobRun.reason)], "cancelled"),
        "finished_at": pw.Case(None, [(started, None)], now),
    }
    query = JobRun.update(values | closed).where(JobRun.id == number, JobRun.state.in_(OPEN_STATES))
    for row in query.returning(JobRun.state).execute():
        return str(row.state)
    JobRun.update(values).where(JobRun.id == number, JobRun.cancelled_at.is_null()).execute()
    return None
