"""`forgekeeper worker` one of whose processes is killed at the worst moment: while it says that it is up."""

import os
import signal
import sys
from datetime import timedelta
from multiprocessing.synchronize import Event

from workers.__main__ import run


def die_with_its_lock(event):
    event._cond.acquire()
    os.kill(os.getpid(), signal.SIGKILL)


Event.set = die_with_its_lock

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], boot=timedelta(seconds=4)))
