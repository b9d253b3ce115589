"""Runs that a person sends: through the ledger, so that each is one run, seen and retried."""

from __future__ import annotations

from forgekeeper.audit import acts
from forgekeeper.batches import BatchSpec, NotSent
from forgekeeper.database import database
from forgekeeper.runs import reconcile
from forgekeeper.runs.holds import Hold
from forgekeeper.runs.identity import identity
from forgekeeper.runs.ledger import JobRun


def claim(batch: BatchSpec) -> int | None:
    """Make a run, and say so in the audit; return None while another is open."""
    with database.atomic():
        run = JobRun.claim_manual(batch.name, by=identity())
        if run is not None:
            acts.record("send", f"run {run}", batch=batch.name, after={"run": run})
    return run


def send(batch: BatchSpec, deliver: reconcile.Deliver) -> JobRun:
    """Send a run of the batch, or again the one that is open; return it.

    This needs connections.  Raises `NotSent` where no run may start.
    """
    if why := Hold.why(batch.name):
        raise NotSent(f"{batch.name} is {why}; `forgekeeper why {batch.name}` says by whom")
    claim(batch)
    run = JobRun.open(batch.name)
    if run is None:
        raise NotSent(f"{batch.name} was busy a moment ago; try again")
    reconcile.send(batch.name, deliver)
    return run
