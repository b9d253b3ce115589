"""How a worker process takes the signals that ask it to end."""

import subprocess
import sys
from pathlib import Path

FORKED = """
import multiprocessing, os, signal, sys
from workers import ending

again = []

def once_more(frame, event, _):
    if (event, frame.f_code.co_name) == ("call", "first"):
        sys.setprofile(None)
        again.append("again")
        os.kill(os.getpid(), signal.SIGTERM)

def worker():
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append("told"))
    ending.follow()
    sys.setprofile(once_more)
    os.kill(os.getpid(), signal.SIGTERM)
    print(again, told, ending.draining.is_set(), flush=True)

process = multiprocessing.get_context("fork").Process(target=worker)
process.start()
process.join()
"""
"""A second signal arrives before a line has been done of what the first one leads to."""


def test_two_signals_at_once_ask_dramatiq_to_end_but_once():
    ended = subprocess.run(
        [sys.executable, "-c", FORKED],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert ended.stdout.strip() == "['again'] ['told'] True"
