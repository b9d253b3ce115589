"""A thread that its process cannot do without takes the process with it, however it ends."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from metrics import threads

ROOT = Path(__file__).parents[2]
PROGRAM = """
import signal, sys, threading
from metrics import logs, threads
from metrics.threads import CriticalThread

logs.configure("json")

class Thread(CriticalThread):
    turns = 0

    def run_until_stopped(self):
        {work}

    def one(self):
        self.turns += 1
        {one}

asked = threading.Event()
{main}
thread = Thread("this one")
thread.start()
thread.join()
print(thread.turns, "turns", flush=True)
while {waits}:
    asked.wait(0.05)
print("ended in order", threads.ended_itself(), flush=True)
"""
LISTENS = "signal.signal(signal.SIGTERM, lambda *_: asked.set())"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); threads.FORCED_EXIT_SECONDS = 1"
FOR_EVER = "while True: self.take_turn(self.one)"


def run(work, *, one="pass", main=LISTENS, waits="not asked.is_set()"):
    command = [sys.executable, "-c", PROGRAM.format(work=work, one=one, main=main, waits=waits)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("work", "one"),
    [
        ("return", "pass"),
        ("raise SystemExit", "pass"),
        (FOR_EVER, "raise MemoryError"),
    ],
)
def test_a_process_whose_thread_has_ended_ends_and_says_so(work, one):
    ended = run(work, one=one)

    assert ended.stdout.endswith("ended in order True\n")
    assert '"level":"critical","message":"process ends itself","reason":"the thread \'this one\' ended"' in (
        ended.stderr
    )


def test_turns_that_fail_now_and_then_cost_a_line_each_and_no_more():
    ended = run(
        "while self.turns < 9: self.take_turn(self.one)\n        self.stopped.set()",
        one="if self.turns % 3: raise MemoryError",
        waits="False",
    )

    assert ended.stdout == "9 turns\nended in order False\n"
    assert ended.stderr.count('"level":"warning","message":"turn failed","thread":"this one"') == 6


def test_the_third_turn_in_a_row_that_fails_is_the_last():
    ended = run(FOR_EVER, one='if self.turns > 4: raise RuntimeError("can\'t start new thread")')

    assert ended.stdout.startswith("7 turns\n")
    assert "can't start new thread" in ended.stderr.splitlines()[-1]


def test_a_process_that_does_not_end_when_it_should_is_ended_by_the_kernel():
    assert run("return", main=DEAF, waits="True").returncode == -signal.SIGALRM


def test_a_thread_that_dies_before_it_says_that_it_runs_is_not_waited_for_for_ever():
    class Dies(threads.DaemonThread):
        """As one does that finds no memory for its first step."""

        def _bootstrap(self):
            pass

    with pytest.raises(RuntimeError, match="can't start new thread"):
        Dies(lambda: None, "dies", timeout=0.1).start()
