"""`forgekeeper worker` that raises `MemoryError` at one place: arguments PLACE and TIMES, then Dramatiq's arguments."""

import sys

from forgekeeper.engine.attempt import Runner
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.process import run_master

PLACES = {"beat": (JobRun, "keep_alive"), "start": (Runner, "__init__")}

if __name__ == "__main__":
    place, times, *arguments = sys.argv[1:]
    kind, name = PLACES[place]
    left, in_order = iter(range(int(times))), getattr(kind, name)

    def spoilt(*arguments):
        for _ in left:
            raise MemoryError
        return in_order(*arguments)

    setattr(kind, name, spoilt)
    sys.exit(run_master(arguments))
