"""Actors that last or kill, the same for our workers and for bare Dramatiq's; each tells when it begins and ends."""

import os
import signal
import threading
import time
from pathlib import Path

import dramatiq

QUEUE = "objects"


def declare(broker, client, notes, **child):
    """Make the actors known to *broker*; what they tell goes into the list *notes*, *child* are options of theirs."""

    def tell(what, key):
        # One clock for all processes of the machine.
        client.rpush(notes, f"{what} {key} {os.getpid()} {time.monotonic()}")

    @dramatiq.actor(broker=broker, queue_name=QUEUE, **child)
    def hold(key, path):
        """Be at it until the file *path* is there."""
        tell("began", key)
        nobody = threading.Event()
        while not Path(path).exists():
            nobody.wait(0.02)
        tell("done", key)

    @dramatiq.actor(broker=broker, queue_name=QUEUE, **child)
    def note(key):
        """Be done at once."""
        tell("began", key)
        tell("done", key)

    @dramatiq.actor(broker=broker, queue_name=QUEUE, **child)
    def kill(key):
        """Take the process down."""
        tell("began", key)
        os.kill(os.getpid(), signal.SIGKILL)
