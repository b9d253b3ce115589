"""The actors, made of what has been declared, and the messages of children."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dramatiq import Broker
from dramatiq.brokers.redis import RedisBroker

from forgekeeper.batches import BATCHES, CHILDREN, ChildSpec
from forgekeeper.delivery.enqueue_many import enqueue_many
from forgekeeper.delivery.queues import RUN
from forgekeeper.fan_out import Enqueued, Keyed
from forgekeeper.runs.attempt import Attempt

SALT = "forgekeeper_salt"
"""The option that makes children's messages differ from one another; nobody reads it."""
RUN_ID = re.compile("[1-9][0-9]{0,17}")
"""How a row's number is written; one digit more might be beyond PostgreSQL's bigint."""


def declare(broker: Broker) -> None:
    """Make each batch and child that has been declared, and is none yet, an actor of the broker."""
    for batch in BATCHES.values():
        if batch.name not in broker.actors:
            batch.bind(broker, Attempt.work, document=batch.document)
    for child in CHILDREN.values():
        if child.name not in broker.actors:
            child.bind(broker, Attempt.work, child=True)


def send_children(
    broker: RedisBroker, run: int, child: ChildSpec, keyed_args: Sequence[Keyed], *, limit_depth: int | None
) -> Enqueued:
    """Send *child* a message of the *run* for each pair of id and arguments, unless it is on its way already."""
    actor = broker.get_actor(child.name)
    return enqueue_many(broker, actor, keyed_args, limit_depth=limit_depth, options={RUN: run}, salt=SALT)
