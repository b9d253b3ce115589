"""The messages of a batch's runs, sent through our broker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dramatiq import Message

from forgekeeper.batches import BatchSpec
from forgekeeper.delivery.enqueue_unique import TOKEN, enqueue_unique, is_dead
from forgekeeper.process.broker import broker
from forgekeeper.runs.ledger import JobRun


@dataclass(frozen=True)
class RunMessages:
    """How `forgekeeper.runs.reconcile` has the runs of *batch* delivered."""

    batch: BatchSpec

    def is_dead(self, run: JobRun) -> bool:
        """Say whether the run's message is a dead letter."""
        return is_dead(broker, message_of(self.batch, run))

    def enqueue(self, run: JobRun) -> bool:
        """Send the run's message; return False when it is on its way already."""
        return enqueue_unique(broker, message_of(self.batch, run))


def message_of(batch: BatchSpec, run: JobRun) -> Message[Any]:
    """Return the message by which a worker starts *run*, and none of the same number in another time."""
    return Message(
        queue_name=batch.queue,
        actor_name=batch.name,
        args=(),
        kwargs={},
        options={TOKEN: str(run.token)},
        message_id=str(run.id),
    )
