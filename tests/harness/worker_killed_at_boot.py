"""`forgekeeper worker` of whose processes one, or the `master`, is killed when they are about to say that they are ready."""

import os
import signal
import sys

from forgekeeper.process.__main__ import run
from forgekeeper.process.ready_pipe import Ready


def kill_itself(_ready):
    os.kill(os.getpid(), signal.SIGKILL)


def kill_master(ready):
    os.kill(os.getppid(), signal.SIGKILL)
    say_it(ready)


if __name__ == "__main__":
    whom, *arguments = sys.argv[1:]
    say_it = Ready.set
    Ready.set = {"process": kill_itself, "master": kill_master}[whom]
    sys.exit(run(arguments))
