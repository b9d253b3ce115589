"""Actors for our workers and for bare Dramatiq's alike; as a program, `forgekeeper worker` with them.

They write into a file what they do: it is there when Redis is not.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import dramatiq

QUEUE = "objects"
NOTES = "NOTES"


def declare(broker, **child):
    """Make the actors known to *broker*; *child* are options of them all."""
    notes = Path(os.environ[NOTES])

    def note_down(what, key):
        # One write of one line: no other process's comes in between.
        with notes.open("a") as file:
            file.write(f"{what} {key} {os.getpid()} {time.monotonic()}\n")

    @dramatiq.actor(broker=broker, queue_name=QUEUE, **child)
    def note(key):
        """Be done at once."""
        note_down("began", key)
        note_down("done", key)

    @dramatiq.actor(broker=broker, queue_name=QUEUE, **child)
    def hold(key, path):
        """Work until the file *path* is there."""
        note_down("began", key)
        _wait_for(path)
        note_down("done", key)

    @dramatiq.actor(broker=broker, queue_name=QUEUE, **child)
    def kill(key):
        """Take the process down."""
        note_down("began", key)
        os.kill(os.getpid(), signal.SIGKILL)

    @dramatiq.actor(broker=broker, queue_name=QUEUE, min_backoff=100, max_backoff=200, **child)
    def fail_first(key, path):
        """Fail as soon as the file *path* is there; be done the next time."""
        again = notes.exists() and f"failed {key} " in notes.read_text()
        note_down("began", key)
        _wait_for(path)
        if not again:
            note_down("failed", key)
            raise ValueError(key)
        note_down("done", key)


def _wait_for(path):
    nobody = threading.Event()
    while not Path(path).exists():
        nobody.wait(0.02)


if __name__ == "__main__":
    from forgekeeper.delivery.broker import broker
    from forgekeeper.process.__main__ import run

    declare(broker, child=True)
    sys.exit(run(sys.argv[1:]))
