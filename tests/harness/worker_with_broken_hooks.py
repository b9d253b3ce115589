"""`forgekeeper worker` whose hook breaks for some actors: a program that tests start, with Dramatiq's arguments."""

import sys

import dramatiq

from forgekeeper.process.__main__ import run
from forgekeeper.process.attempts import Attempts
from forgekeeper.process.broker import broker
from forgekeeper.runs.attempt import Attempt

QUEUE = "cron"

# What each declared batch and child is made of: it asks for its attempt.
dramatiq.actor(Attempt.work, actor_name="broken_batch", broker=broker, queue_name=QUEUE, document=None)
dramatiq.actor(Attempt.work, actor_name="broken_child", broker=broker, queue_name=QUEUE, child=True)


@dramatiq.actor(broker=broker, queue_name=QUEUE, document=None)
def idle_batch():
    """Be done, without asking for anything."""


@dramatiq.actor(broker=broker, queue_name=QUEUE, child=True)
def idle_child():
    """Be done, without asking for anything."""


@dramatiq.actor(broker=broker, queue_name=QUEUE, document=None)
def undeclared_batch():
    """Be done, as an actor that is a batch by its option alone."""


def _breaking(hook):
    def broken(self, broker, message):
        if message.actor_name.startswith(("broken", "idle")):
            raise RuntimeError("a defect in a hook")
        hook(self, broker, message)

    return broken


if __name__ == "__main__":
    Attempts.before_process_message = _breaking(Attempts.before_process_message)
    sys.exit(run(sys.argv[1:]))
