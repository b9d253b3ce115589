"""Sending a batch by hand: through the ledger, so that it is run once, seen and retried as any other run."""

from __future__ import annotations

from typing import Any

from dramatiq import Message

from forgekeeper.audit import acts
from forgekeeper.batches import BatchSpec, NotSent
from forgekeeper.database import database
from forgekeeper.identity import identity
from forgekeeper.process.run_messages import RunMessages, message_of
from forgekeeper.runs import reconcile
from forgekeeper.runs.holds import Hold
from forgekeeper.runs.ledger import JobRun


def claim(batch: BatchSpec, *, recorded: bool = False) -> int | None:
    """Make a run by hand, and say so in the audit unless that is *recorded*; return None while another is open."""
    with database.atomic():
        run = JobRun.claim_manual(batch.name, by=identity())
        if run is not None and not recorded:
            acts.record("send", f"run {run}", batch=batch.name, after={"run": run})
    return run


def send(batch: BatchSpec) -> Message[Any]:
    """Send a run of the batch, or again the one that is open; return its message.

    This needs connections.  Raises `NotSent` where no run may start.
    """
    if why := Hold.why(batch.name):
        raise NotSent(f"{batch.name} is {why}; `forgekeeper why {batch.name}` says by whom")
    number = claim(batch)
    run = JobRun.open(batch.name) if number is None else JobRun.get_by_id(number)
    if run is None:
        raise NotSent(f"{batch.name} was busy a moment ago; try again")
    reconcile.send(batch.name, RunMessages(batch))
    return message_of(batch, run)
