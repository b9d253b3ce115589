"""The actors: what a message of each declared batch or child calls."""

from __future__ import annotations

from typing import Any

import dramatiq
from dramatiq import Broker

from forgekeeper.batches import BATCHES, CHILDREN, BatchSpec, ChildSpec, Declared
from forgekeeper.runs import attempt, child, preconditions
from forgekeeper.runs.blocked import Blocked
from forgekeeper.runs.run import Run


def declare(broker: Broker) -> None:
    """Make an actor of each batch and child that has been declared and is none yet."""
    for batch in BATCHES.values():
        if batch.name not in broker.actors:
            dramatiq.actor(broker=broker, document=batch.document, **_options(batch))(_parent(broker, batch))
    for one in CHILDREN.values():
        if one.name not in broker.actors:
            dramatiq.actor(broker=broker, child=True, **_options(one))(_child(one))


def _options(declared: Declared) -> dict[str, Any]:
    limit = round(declared.time_limit.total_seconds() * 1000)
    return {"actor_name": declared.name, "queue_name": declared.queue, "time_limit": limit}


def _parent(broker: Broker, batch: BatchSpec) -> Any:
    def run() -> None:
        started, outcome = attempt.current(), batch.outcome()
        started.begin(outcome)
        try:
            preconditions.require(batch, started.settings)
            mine = Run(
                batch,
                started.settings,
                deadline=started.deadline(batch.budget),
                number=started.run.id,
                fan_out=lambda one, keyed_args: started.fan_out(broker.get_actor(one.name), keyed_args),
                outcome=outcome,
            )
            batch.work(mine)
            started.skipped = mine.skipped
        except Blocked as blocked:
            started.blocked = blocked

    return run


def _child(declared: ChildSpec) -> Any:
    def run(*args: Any, **kwargs: Any) -> None:
        started, outcome = child.current(), declared.outcome()
        started.begin(outcome)
        try:
            preconditions.require(declared.of, started.settings)
            deadline = started.deadline(declared.budget, pace=started.settings.pace(declared.of.name))
            mine = Run(declared, started.settings, deadline=deadline, number=started.run, outcome=outcome)
            declared.work(mine, *args, **kwargs)
            started.more = mine.more
        except Blocked as blocked:
            started.blocked = blocked

    return run
