"""A worker with an actor that does nothing, and messages for it.

`python -m benchmarks.noop enqueue KIND COUNT`, and `… work KIND` with Dramatiq's arguments:

bare        Dramatiq as it comes
observed    our middleware, with a child that is counted and logged, as those of a batch are
unmeasured  the same child, neither counted nor shown on a page
unlogged    the same child, counted, but without lines and what is noted for them
unobserved  the same child, neither counted nor logged
"""

from __future__ import annotations

import os
import sys
from typing import Self

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.cli import main, make_argument_parser

from forgekeeper.delivery.boot import load
from forgekeeper.engine import attempt as attempts
from forgekeeper.engine.attempt import Attempt
from forgekeeper.platform.connections import Limits, connect
from metrics.counting import WORKER
from metrics.endpoint import begin, listen

COUNTED = {"observed", "unlogged"}
LOGGED = {"observed", "unmeasured"}
QUEUES = {"bare": "default", **dict.fromkeys((*COUNTED, *LOGGED, "unobserved"), "git")}
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"


class Silent(Attempt):
    """An attempt that says nothing, and notes nothing to say."""

    def __enter__(self) -> Self:
        """Begin it."""
        return self

    def close(self, error: BaseException | None) -> None:
        """Count what came of it."""
        self.error = error
        self._count()


def actor(kind: str, redis_url: str) -> dramatiq.Actor[[], None]:
    """Declare the actor of that kind, and connect its broker to the Redis at *redis_url*."""
    if kind == "bare":
        return _bare(redis_url)
    return _child(kind)


def _bare(redis_url: str) -> dramatiq.Actor[[], None]:
    broker = RedisBroker(url=redis_url)
    dramatiq.set_broker(broker)
    return dramatiq.actor(actor_name="nothing", queue_name=QUEUES["bare"], broker=broker)(_nothing)


def _child(kind: str) -> dramatiq.Actor[[], None]:
    from forgekeeper.delivery.broker import broker, load_batches

    def child(_attempt: Attempt) -> None:
        """Do nothing."""

    load_batches()
    if kind not in COUNTED:
        for name in ("inc", "dec", "observe"):
            setattr(WORKER, name, lambda *_labels, **_amount: None)
    if kind not in LOGGED:
        attempts.Attempt = Silent  # type: ignore[misc]
    # The actor of the catalogue itself: others are not counted.
    real: dramatiq.Actor[[], None] = broker.get_actor("clean_project_refs")
    real.fn = child  # type: ignore[assignment]
    return real


def _nothing() -> None:
    """Do nothing."""


def enqueue(kind: str, count: int) -> None:
    """Put *count* messages of that kind in."""
    sent = _connected(kind)
    for _ in range(count):
        sent.send()


def work(kind: str, arguments: list[str]) -> int:
    """Be a worker's master with Dramatiq's *arguments*; return its exit status."""
    if kind in COUNTED and MULTIPROCESS not in os.environ:
        # As `forgekeeper worker` does it: the client looks at this once, when it is imported.
        with listen("127.0.0.1", 0) as listening:
            os.environ["FORGEKEEPER_METRICS_PORT_WORKER"] = str(listening.getsockname()[1])
        os.environ[MULTIPROCESS] = str(begin())
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.noop", "work", kind, *arguments])
    _connected(kind)
    # The broker is set; Dramatiq wants a module to import all the same.
    status: int = main(make_argument_parser().parse_args(["benchmarks.noop", "--skip-logging", *arguments]))
    return status


def _connected(kind: str) -> dramatiq.Actor[[], None]:
    settings = load()
    declared = actor(kind, settings.require_redis())
    connect(settings, Limits.of_worker(settings), name="benchmark", connections=1)
    return declared


if __name__ == "__main__":
    TASK, KIND, *REST = sys.argv[1:]
    if TASK == "work":
        sys.exit(work(KIND, REST))
    enqueue(KIND, int(REST[0]))
