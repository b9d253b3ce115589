"""`forgekeeper worker` of whose processes one, or the `master`, is killed when they are about to say that they are up."""

import os
import signal
import sys

from forgekeeper.process.__main__ import run
from forgekeeper.process.ready_pipe import Word


def kill_itself(_word):
    os.kill(os.getpid(), signal.SIGKILL)


def kill_master(word):
    os.kill(os.getppid(), signal.SIGKILL)
    word_of_the_living(word)


if __name__ == "__main__":
    whom, *arguments = sys.argv[1:]
    word_of_the_living = Word.set
    Word.set = {"process": kill_itself, "master": kill_master}[whom]
    sys.exit(run(arguments))
