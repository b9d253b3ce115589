"""`forgekeeper worker` with children that hold, fail and kill: a program that tests start, with Dramatiq's arguments."""

import os
import signal
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import dramatiq.worker

from forgekeeper import batch, child
from forgekeeper.delivery import process
from forgekeeper.platform.connections import client
from forgekeeper.process import run_master

QUEUE = "objects"
dramatiq.worker.POST_PROCESS_MESSAGE_RETRY_DELAY_SECS = 0.2  # five seconds are long for a test
process.TIME_LIMIT_GRACE_SECONDS = 1.0  # and so is a minute


@dataclass
class OddResult:
    """Nothing to tell."""

    enqueued: int = 0


@batch(cron="off", budget=timedelta(minutes=1), outcome=OddResult, writes="its children note what they did")
def odd(_now):
    """Have children."""
    return []


def declared(work):
    """Declare *work* as a child."""
    limit = timedelta(seconds=0.1) if work.__name__ == "be_deaf" else timedelta(minutes=10)
    times = {"budget": min(limit, timedelta(minutes=1)), "time_limit": limit}
    return child(odd, queue=QUEUE, outcome=OddResult, records=[], enqueued_as="enqueued", **times)(work)


@declared
def note(_now, key):
    """Be done at once."""
    client.rpush("done", key)
    return []


@declared
def hold(_now, key, path):
    """Work until the file *path* is there."""
    client.rpush("started", f"{key} {os.getpid()}")
    _wait_for(path)
    client.rpush("done", key)
    return []


@declared
def kill(_now, key):
    """Take the process down."""
    client.rpush("started", f"{key} {os.getpid()}")
    os.kill(os.getpid(), signal.SIGKILL)


@declared
def fail_once_there(_now, path):
    """Fail as soon as the file *path* is there, without a word to Redis."""
    Path(f"{path}.started").touch()
    _wait_for(path)
    raise ValueError("there")


@declared
def go_on(_now, path):
    """Leave the rest to a successor, once."""
    more = not Path(path).exists()
    Path(path).touch()
    yield from ()
    return "deadline" if more else None


@declared
def end_the_thread(_now):
    """Make Dramatiq's thread run into an error that nobody catches."""
    threading.current_thread().consumers = {}
    return []


@declared
def be_deaf(_now):
    """Wait in C, where no time limit is heard of."""
    nobody = threading.Lock()
    with nobody:
        nobody.acquire()


def _wait_for(path):
    nobody = threading.Event()
    while not Path(path).exists():
        nobody.wait(0.01)


if __name__ == "__main__":
    sys.exit(run_master(sys.argv[1:]))
