"""`forgekeeper worker` one of whose processes is killed at the worst moments: `before` or `while` it says that it is up."""

import os
import signal
import sys
from datetime import timedelta
from multiprocessing.synchronize import Event

from workers.__main__ import run


def die_with_its_lock(event):
    event._cond.acquire()
    die(event)


def die(_event):
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    moment, boot, *arguments = sys.argv[1:]
    Event.set = {"before": die, "while": die_with_its_lock}[moment]
    sys.exit(run(arguments, boot=timedelta(seconds=float(boot))))
