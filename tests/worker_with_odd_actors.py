"""`forgekeeper worker` with actors that hold, fail and kill: a program that tests start, with Dramatiq's arguments."""

import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import dramatiq
import dramatiq.worker

from workers.__main__ import run
from workers.broker import broker
from workers.child import current
from workers.clients import client

QUEUE = "objects"
dramatiq.worker.POST_PROCESS_MESSAGE_RETRY_DELAY_SECS = 0.2  # five seconds are long for a test


@dataclass
class Outcome:
    """Nothing to tell."""


@dramatiq.actor(broker=broker, queue_name=QUEUE)
def note(key):
    """Be done at once."""
    client.rpush("done", key)


@dramatiq.actor(broker=broker, queue_name=QUEUE)
def nothing():
    """Do nothing at all."""


@dramatiq.actor(broker=broker, queue_name=QUEUE)
def hold(key, path):
    """Be at it until the file *path* is there."""
    client.rpush("started", f"{key} {os.getpid()}")
    _wait_for(path)
    client.rpush("done", key)


@dramatiq.actor(broker=broker, queue_name=QUEUE)
def wait(path):
    """Be at it until the file *path* is there, and never ask Redis for anything."""
    Path(f"{path}.started").touch()
    _wait_for(path)


@dramatiq.actor(broker=broker, queue_name=QUEUE)
def kill(key):
    """Take the process down."""
    client.rpush("started", f"{key} {os.getpid()}")
    os.kill(os.getpid(), signal.SIGKILL)


@dramatiq.actor(broker=broker, queue_name=QUEUE, child=True, min_backoff=100, max_backoff=200)
def fail_first(key, path):
    """Fail as soon as the file *path* is there; succeed the next time."""
    current().outcome = Outcome()
    tries = Path(f"{path}.tries")
    with tries.open("a") as file:
        file.write("x")
    _wait_for(path)
    if tries.read_text() == "x":
        raise ValueError(key)
    client.rpush("done", key)


@dramatiq.actor(broker=broker, queue_name=QUEUE, child=True, max_retries=0)
def fail(key):
    """Fail for good."""
    raise ValueError(key)


@dramatiq.actor(broker=broker, queue_name=QUEUE)
def end_the_thread():
    """Make Dramatiq's thread run into an error that nobody catches."""
    threading.current_thread().consumers = {}


def _wait_for(path):
    nobody = threading.Event()
    while not Path(path).exists():
        nobody.wait(0.01)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
