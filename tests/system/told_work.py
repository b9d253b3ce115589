"""Actors for our workers and for bare Dramatiq's alike.  They tell in a file what they do: it is there when Redis is not."""

import os
import threading
import time
from pathlib import Path

import dramatiq

QUEUE = "objects"
LIMIT = 1_200
"""Milliseconds that an actor may take which is said to have a time limit."""


def declare(broker, notes, **child):
    """Make the actors known to *broker*; what they tell goes into the file *notes*.

    *child* are options of them all.
    """

    def tell(what, key):
        # One write of one line: no other process's comes in between.
        with Path(notes).open("a") as file:
            file.write(f"{what} {key} {os.getpid()} {time.monotonic()}\n")

    @dramatiq.actor(broker=broker, queue_name=QUEUE, **child)
    def note(key):
        """Be done at once."""
        tell("done", key)

    @dramatiq.actor(broker=broker, queue_name=QUEUE, **child)
    def hold(key, path):
        """Be at it until the file *path* is there."""
        tell("began", key)
        _wait_for(path)
        tell("done", key)

    def fail_first(key, path):
        """Fail as soon as the file *path* is there; be done the next time."""
        again = f" {key} " in Path(notes).read_text() if Path(notes).exists() else False
        tell("began", key)
        _wait_for(path)
        if not again:
            tell("failed", key)
            raise ValueError(key)
        tell("done", key)

    options = {"min_backoff": 100, "max_backoff": 200, **child}
    dramatiq.actor(fail_first, broker=broker, queue_name=QUEUE, **options)
    dramatiq.actor(
        fail_first, actor_name="fail_first_in_time", broker=broker, queue_name=QUEUE, time_limit=LIMIT, **options
    )
    return tell


def _wait_for(path):
    nobody = threading.Event()
    while not Path(path).exists():
        nobody.wait(0.02)
