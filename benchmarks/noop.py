"""A worker with an actor that does nothing, and messages for it.

`python -m benchmarks.noop enqueue KIND COUNT`, and `… work KIND` with Dramatiq's arguments:

 bare        Dramatiq with its defaults
 observed    our middleware, with a child that is counted and logged like a batch's child
 unmeasured  the same child, without metrics
 unlogged    the same child, counted, but without log lines and their facts
 unobserved  the same child, neither counted nor logged
"""

from __future__ import annotations

import os
import sys
from typing import Self

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.cli import main, make_argument_parser

from forgekeeper.api.batches import CHILDREN
from forgekeeper.delivery.boot import load_settings
from forgekeeper.engine import attempt as attempts
from forgekeeper.engine.attempt import Attempt
from forgekeeper.platform.connections import ServerTimeouts, configure_clients
from forgekeeper.platform.database import database
from metrics.endpoint import create_metrics_folder, open_listening_socket
from metrics.instruments import WORKER_METRICS

COUNTED = {"observed", "unlogged"}
LOGGED = {"observed", "unmeasured"}
QUEUES = {"bare": "default", **dict.fromkeys((*COUNTED, *LOGGED, "unobserved"), "git")}
CHILD = "clean_project_refs"
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"


class Silent(Attempt):
    """An attempt that logs nothing and collects nothing for the log."""

    def __enter__(self) -> Self:
        """Begin the attempt."""
        return self

    def close(self, error: BaseException | None) -> None:
        """Count the result."""
        self.error = error
        self._count_end()


def actor(kind: str, redis_url: str) -> dramatiq.Actor[[], None]:
    """Declare the actor of *kind*, and connect its broker to the Redis at *redis_url*."""
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
            setattr(WORKER_METRICS, name, lambda *_labels, **_amount: None)
    if kind not in LOGGED:
        attempts.Attempt = Silent  # type: ignore[misc]
    # The catalogue's own actor, because other actors are not counted.
    real: dramatiq.Actor[[], None] = broker.get_actor(CHILD)
    real.fn = child  # type: ignore[assignment]
    return real


def _nothing() -> None:
    """Do nothing."""


def enqueue(kind: str, count: int) -> None:
    """Enqueue *count* messages of *kind*; children as a run sends them."""
    sent = _connected(kind)
    if kind == "bare":
        for _ in range(count):
            sent.send()
        return
    from forgekeeper.delivery.broker import broker
    from forgekeeper.delivery.children import send_children

    with database.connection_context():
        send_children(
            broker, 1, CHILDREN[CHILD], [(f"{CHILD}:{number}", ()) for number in range(count)], limit_depth=None
        )


def work(kind: str, arguments: list[str]) -> int:
    """Run a worker's master with Dramatiq's *arguments*; return its exit status."""
    if kind in COUNTED and MULTIPROCESS not in os.environ:
        # As in `forgekeeper worker`: the client reads this variable once, at its import.
        with open_listening_socket("127.0.0.1", 0) as listening:
            os.environ["FORGEKEEPER_METRICS_PORT_WORKER"] = str(listening.getsockname()[1])
        os.environ[MULTIPROCESS] = str(create_metrics_folder())
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.noop", "work", kind, *arguments])
    _connected(kind)
    # The broker is set, but Dramatiq requires a module to import.
    status: int = main(make_argument_parser().parse_args(["benchmarks.noop", "--skip-logging", *arguments]))
    return status


def _connected(kind: str) -> dramatiq.Actor[[], None]:
    settings = load_settings()
    declared = actor(kind, settings.require_redis())
    configure_clients(settings, ServerTimeouts.for_worker(settings), name="benchmark", connections=1)
    return declared


if __name__ == "__main__":
    TASK, KIND, *REST = sys.argv[1:]
    if TASK == "work":
        sys.exit(work(KIND, REST))
    enqueue(KIND, int(REST[0]))
