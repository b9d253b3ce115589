"""How a batch and its children are declared: what an actor needs around the function that does the work."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec

import dramatiq
from dramatiq import Actor

from metrics.catalogue import BATCHES
from forgekeeper.runs import attempt, child, preconditions
from forgekeeper.runs.attempt import Attempt
from forgekeeper.runs.blocked import Blocked
from forgekeeper.process.broker import broker
from forgekeeper.runs.child import Child

Arguments = ParamSpec("Arguments")


def batch(*, document: int | None, outcome: type[Any]) -> Callable[[Callable[[Attempt], None]], Actor[[], None]]:
    """Declare the parent of a batch, of that *document*.

    Its function gets the attempt, whose outcome, empty at first, it lets grow with each chunk.
    The catalogue says which queue it goes through, and after how long it is killed.
    """

    def declare(work: Callable[[Attempt], None]) -> Actor[[], None]:
        @wraps(work)
        def run() -> None:
            started = attempt.current()
            started.begin(outcome())
            try:
                preconditions.require(started.batch, started.settings)
                work(started)
            except Blocked as blocked:
                started.blocked = blocked

        return dramatiq.actor(broker=broker, document=document, **_options(work.__name__))(run)

    return declare


def child_of(
    parent: Actor[[], None], *, outcome: type[Any]
) -> Callable[[Callable[Concatenate[Child, Arguments], None]], Actor[Arguments, None]]:
    """Declare the child of *parent*'s fan-out; otherwise like `batch`."""

    def declare(work: Callable[Concatenate[Child, Arguments], None]) -> Actor[Arguments, None]:
        @wraps(work)
        def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
            started = child.current()
            started.begin(outcome())
            try:
                preconditions.require(parent.actor_name, started.settings)
                work(started, *args, **kwargs)
            except Blocked as blocked:
                started.blocked = blocked

        return dramatiq.actor(broker=broker, child=True, **_options(work.__name__))(run)

    return declare


def _options(name: str) -> dict[str, Any]:
    known = BATCHES[name]
    return {"queue_name": known.queue, "time_limit": round(known.time_limit.total_seconds() * 1000)}
