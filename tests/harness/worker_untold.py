"""`forgekeeper worker` whose master never tells the thread that writes what its processes say to end."""

import sys
import threading

import dramatiq.cli

from forgekeeper.process.__main__ import run


class Untold(threading.Event):
    def set(self):
        pass


if __name__ == "__main__":
    dramatiq.cli.Event = Untold
    sys.exit(run(sys.argv[1:]))
