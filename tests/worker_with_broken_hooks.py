"""`forgekeeper worker` whose hooks break for some actors: a program that tests start, with Dramatiq's arguments."""

import sys

import dramatiq

from forgekeeper.process.__main__ import run
from forgekeeper.process.broker import broker
from forgekeeper.process.middleware import Children, Runs
from forgekeeper.runs import attempt, child

QUEUE = "cron"


@dramatiq.actor(broker=broker, queue_name=QUEUE, document=None)
def broken_batch():
    """Ask for the attempt, as every batch does."""
    attempt.current()


@dramatiq.actor(broker=broker, queue_name=QUEUE, child=True)
def broken_child():
    """Ask for the child, as every child does."""
    child.current()


@dramatiq.actor(broker=broker, queue_name=QUEUE, document=None)
def idle_batch():
    """Be done, without asking for anything."""


@dramatiq.actor(broker=broker, queue_name=QUEUE, child=True)
def idle_child():
    """Be done, without asking for anything."""


def _breaking(hook):
    def broken(self, broker, message):
        if message.actor_name.startswith(("broken", "idle")):
            raise RuntimeError("a defect in a hook")
        hook(self, broker, message)

    return broken


if __name__ == "__main__":
    for middleware in (Runs, Children):
        middleware.before_process_message = _breaking(middleware.before_process_message)
    sys.exit(run(sys.argv[1:]))
