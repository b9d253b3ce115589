"""Batches that a test declares, and that are forgotten after it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from forgekeeper import batch
from forgekeeper.api.batches import BATCHES, CHILDREN, FLAGS


@dataclass
class ToyResult:
    """Result of a toy batch."""

    deleted: int = 0
    left: int = 0
    failed: int = 0
    stopped: str = "drained"


@contextmanager
def forget_declarations() -> Iterator[None]:
    """Forget the declarations of the block at its end."""
    kept = [(registry, dict(registry)) for registry in (BATCHES, CHILDREN, FLAGS)]
    try:
        yield
    finally:
        for registry, before in kept:
            registry.clear()
            registry.update(before)


def declare_toy_batch(**facts):
    """Declare a batch whose function returns nothing due."""

    def toys(now):
        """Put the toys away."""
        return []

    times = {"cron": "* * * * *", "budget": timedelta(minutes=1), "time_limit": timedelta(minutes=2)}
    return batch(**times | {"outcome": ToyResult} | facts)(toys)
