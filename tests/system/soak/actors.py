"""What messages do, for our workers and for bare Dramatiq's alike: they write into a file what they do.

As a program it is `forgekeeper worker` with them; as a module it is what Dramatiq's own command loads.
"""

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import dramatiq
from dramatiq.brokers.redis import RedisBroker

QUEUE, NOTES = "objects", "NOTES"
URL = "STOCK_REDIS_URL"
"""Where bare Dramatiq's Redis is."""


def note(key):
    """Be done at once."""
    _note_down("began", key)
    _note_down("done", key)


def hold(key, path):
    """Work until the file *path* is there."""
    _note_down("began", key)
    nobody = threading.Event()
    while not Path(path).exists():
        nobody.wait(0.02)
    _note_down("done", key)


def kill(key):
    """Take the process down."""
    _note_down("began", key)
    os.kill(os.getpid(), signal.SIGKILL)


ACTORS = (note, hold, kill)


def _note_down(what, key):
    # One write of one line: no other process's comes in between.
    with Path(os.environ[NOTES]).open("a") as file:
        file.write(f"{what} {key} {time.monotonic()}\n")


@dataclass
class Outcome:
    """Nothing to report."""

    enqueued: int = 0


def declare():
    """Declare them as children of a batch that never runs."""
    from forgekeeper import batch, child

    @batch(cron="off", budget=timedelta(minutes=1), outcome=Outcome, writes="its children note what they did")
    def soaked(_now):
        """Have children."""
        return []

    for actor in ACTORS:

        def work(_now, *args, actor=actor):
            actor(*args)
            return []

        work.__name__, work.__doc__ = actor.__name__, actor.__doc__
        times = {"budget": timedelta(minutes=5), "time_limit": timedelta(minutes=10)}
        child(soaked, queue=QUEUE, outcome=Outcome, records=[], enqueued_as="enqueued", **times)(work)


if __name__ == "__main__":
    from forgekeeper.process.__main__ import run

    declare()
    sys.exit(run(sys.argv[1:]))
elif URL in os.environ:
    # By default it would take minutes to die three times.
    broker = RedisBroker(url=os.environ[URL], heartbeat_timeout=1000, maintenance_chance=1_000_000)
    dramatiq.set_broker(broker)
    for work in ACTORS:
        dramatiq.actor(work, broker=broker, queue_name=QUEUE)
