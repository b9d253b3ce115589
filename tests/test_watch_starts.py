"""The threads that watch statements: no statement waits for one that never runs."""

import threading
import time

from models.watch import START, Thread

LIMIT = 30.0


def test_a_thread_that_dies_before_it_says_that_it_runs_is_not_waited_for_for_ever():
    class Dies(Thread):
        """As one does that finds no memory for its first step."""

        def _bootstrap(self):
            pass

    thread, began = Dies(lambda: None, "dies"), time.monotonic()
    starter = threading.Thread(target=thread.start, daemon=True)
    starter.start()
    starter.join(LIMIT)

    assert not starter.is_alive()
    assert time.monotonic() - began >= START
    assert not thread.is_alive()


def test_a_thread_that_runs_is_waited_for_until_it_says_so():
    done = threading.Event()
    thread = Thread(done.wait, "runs")

    thread.start()

    assert thread.is_alive()
    done.set()
    thread.join(LIMIT)
