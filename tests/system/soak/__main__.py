"""A soak from the command line; exit 1 if any property does not hold."""

import argparse
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from tempfile import mkdtemp

from .soak import soak


def main():
    """Run it from the command line; exit 1 if any property does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    options = parser.parse_args()
    # Whoever ends it ends its services with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = Path(mkdtemp(prefix="forgekeeper-soak-"))
    sys.stdout.write(f"seed {options.seed}; everything is written down in {folder}\n")

    def say(line):
        sys.stdout.write(f"{time.strftime('%H:%M:%S')} {line}\n")
        sys.stdout.flush()

    report = soak(seed=options.seed, seconds=60 * options.minutes, folder=folder, say=say)
    sys.stdout.write("\n".join([*report.lines(), ""]))
    violated = report.outcome.violations
    if not violated:
        shutil.rmtree(folder)
    sys.exit(1 if violated else 0)


main()
