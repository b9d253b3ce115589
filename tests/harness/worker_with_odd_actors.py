"""`forgekeeper worker` with children that wait, fail or kill the process; takes Dramatiq's arguments."""

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
dramatiq.worker.POST_PROCESS_MESSAGE_RETRY_DELAY_SECS = 0.2  # instead of five seconds
process.TIME_LIMIT_GRACE_SECONDS = 1.0  # instead of a minute


@dataclass
class OddResult:
    """Result of the parent."""

    enqueued: int = 0


@batch(cron="off", budget=timedelta(minutes=1), outcome=OddResult, writes="its children note what they did")
def odd(_now):
    """Parent of the children below."""
    return []


def declared(work):
    """Declare *work* as a child."""
    limit = timedelta(seconds=0.1) if work.__name__ == "be_deaf" else timedelta(minutes=10)
    times = {"budget": min(limit, timedelta(minutes=1)), "time_limit": limit}
    return child(odd, queue=QUEUE, outcome=OddResult, records=[], enqueued_as="enqueued", **times)(work)


@declared
def note(_now, key):
    """Record the key, and end at once."""
    client.rpush("done", key)
    return []


@declared
def hold(_now, key, path):
    """Wait until the file *path* exists."""
    client.rpush("started", f"{key} {os.getpid()}")
    _wait_for(path)
    client.rpush("done", key)
    return []


@declared
def kill(_now, key):
    """Kill the process."""
    client.rpush("started", f"{key} {os.getpid()}")
    os.kill(os.getpid(), signal.SIGKILL)


@declared
def kill_if_bad(_now, key):
    """Record the key, and kill the process if it is ``bad``."""
    if key == "bad":
        client.rpush("started", f"{key} {os.getpid()}")
        os.kill(os.getpid(), signal.SIGKILL)
    client.rpush("done", key)
    return []


@declared
def fail_once_there(_now, path):
    """Fail as soon as the file *path* exists, without a command to Redis."""
    Path(f"{path}.started").touch()
    _wait_for(path)
    raise ValueError("there")


@declared
def go_on(_now, path):
    """Leave work to a successor, once."""
    more = not Path(path).exists()
    Path(path).touch()
    yield from ()
    return "deadline" if more else None


@declared
def end_the_thread(_now):
    """Make the thread of Dramatiq's worker end by an uncaught error."""
    threading.current_thread().consumers = {}
    return []


@declared
def be_deaf(_now):
    """Wait in C code, where Dramatiq's time limit cannot interrupt it."""
    nobody = threading.Lock()
    with nobody:
        nobody.acquire()


def _wait_for(path):
    nobody = threading.Event()
    while not Path(path).exists():
        nobody.wait(0.01)


if __name__ == "__main__":
    sys.exit(run_master(sys.argv[1:]))
