"""What waits for a thread, and threads that wait for it."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from queue import Empty

import pytest

from forgekeeper.delivery import work_queue as module
from forgekeeper.delivery.work_queue import WorkQueue
from tests.harness.waiting import wait_until

LIMIT = 20.0
LONG = timedelta(hours=1).total_seconds()


@pytest.fixture
def idle(monkeypatch):
    """Return a queue, and what becomes of a thread that idles there, and would for long."""
    monkeypatch.setattr(module, "IDLE", LONG)
    queue = WorkQueue()
    with ThreadPoolExecutor() as threads:
        found = threads.submit(queue.get, timeout=LONG)
        assert wait_until(lambda: queue.not_empty._waiters, LIMIT)
        yield queue, found
        queue.end()


def test_an_idle_thread_has_what_comes(idle):
    queue, found = idle

    queue.put("work")

    assert found.result(LIMIT) == "work"


def test_an_idle_thread_that_is_to_end_finds_nothing_at_once(idle):
    queue, found = idle

    queue.end()

    assert isinstance(found.exception(LIMIT), Empty)


@pytest.mark.timeout(LIMIT, func_only=True)
def test_a_thread_that_is_to_end_does_not_begin_to_wait(monkeypatch):
    monkeypatch.setattr(module, "IDLE", LONG)
    queue = WorkQueue()
    queue.end()

    with pytest.raises(Empty):
        queue.get(timeout=LONG)
