"""The message of a run, and sending a batch by hand: through the ledger, so that it is one run, seen and retried.

The row of a run decides; its message only says that there is something to start.
"""

from __future__ import annotations

from typing import Any

from dramatiq import Message

from forgekeeper.audit import acts
from forgekeeper.batches import BATCHES, BatchSpec, NotSent
from forgekeeper.database import database
from forgekeeper.runs import reconcile
from forgekeeper.runs.holds import Hold
from forgekeeper.runs.identity import identity
from forgekeeper.runs.ledger import JobRun

TOKEN = "forgekeeper_token"  # noqa: S105, it is no secret
"""The option in which a run's message says which run of its number it is for."""


def message_of(batch: BatchSpec, run: JobRun) -> Message[Any]:
    """Return the message by which a worker starts *run*, and no other run that had its number before a restore."""
    return Message(
        queue_name=batch.queue,
        actor_name=batch.name,
        args=(),
        kwargs={},
        options={TOKEN: str(run.token)},
        message_id=str(run.id),
    )


def deliver(run: JobRun) -> None:
    """Send the run's message; raise `redis.RedisError`."""
    batch = BATCHES[run.batch]
    batch.broker.enqueue(message_of(batch, run))


def claim(batch: BatchSpec) -> int | None:
    """Make a run by hand, and say so in the audit; return None while another is open."""
    with database.atomic():
        run = JobRun.claim_manual(batch.name, by=identity())
        if run is not None:
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
    reconcile.send(batch.name, deliver)
    return message_of(batch, run)
