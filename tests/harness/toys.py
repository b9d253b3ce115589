"""Toy batches: declared in a test, and gone after it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from forgekeeper import batch
from forgekeeper.api.batches import BATCHES, CHILDREN, FLAGS


@dataclass
class ToyResult:
    """What a toy comes to."""

    deleted: int = 0
    left: int = 0
    failed: int = 0
    stopped: str = "drained"


@contextmanager
def forget_declarations() -> Iterator[None]:
    """Forget in the end whatever is declared meanwhile."""
    kept = [(registry, dict(registry)) for registry in (BATCHES, CHILDREN, FLAGS)]
    try:
        yield
    finally:
        for registry, before in kept:
            registry.clear()
            registry.update(before)


def declare_toy_batch(**facts):
    """Declare a batch of its own; its function does nothing."""

    def toys(now):
        """Put the toys away."""
        return []

    times = {"cron": "* * * * *", "budget": timedelta(minutes=1), "time_limit": timedelta(minutes=2)}
    return batch(**times | {"outcome": ToyResult} | facts)(toys)
