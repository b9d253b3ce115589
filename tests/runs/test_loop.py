"""The loop of a batch in a scheduler: it turns, whatever a turn comes to."""

import threading
from queue import SimpleQueue

import pytest

import scheduler
from scheduler import Loop
from tests.harness.ticks import BATCH, HOUR, LIMIT, NOON, clock_is, ledger, rows
from tests.harness.waiting import wait_until

__all__ = ["ledger"]

pytestmark = pytest.mark.usefixtures("ledger")


# The loop around it


@pytest.fixture
def patient(ledger):
    """Settings under which a loop turns when it is woken, and not within the test without."""
    return ledger.model_copy(update={"poll_interval": HOUR})


@pytest.fixture
def loops():
    """Make loops that are stopped in the end."""
    made = []

    def make(batch, settings):
        made.append(Loop(batch, settings, broken=threading.Event(), asked=SimpleQueue()))
        return made[-1]

    yield make
    for loop in made:
        loop.stop()
        if loop.ident:
            loop.join()


def test_a_loop_reconciles_when_it_is_woken(loops, patient, monkeypatch):
    turned, in_order = threading.Event(), scheduler.reconcile

    def turn(*arguments, **facts):
        in_order(*arguments, **facts)
        turned.set()

    monkeypatch.setattr(scheduler, "reconcile", turn)
    loop = loops(BATCH, patient)
    loop.start()
    # Its first turn is through: until then it might see noon without being woken.
    assert turned.wait(LIMIT)
    clock_is(NOON)

    loop.wake()

    assert wait_until(lambda: rows("enqueued") == {NOON}, LIMIT)


def test_a_loop_one_of_whose_turns_fails_for_any_reason_turns_again(loops, patient, monkeypatch):
    monkeypatch.setattr(scheduler, "AGAIN", 0.0)
    errors, in_order = iter([MemoryError, RuntimeError]), scheduler.reconcile

    def spoilt(*arguments, **facts):
        for error in errors:
            raise error
        in_order(*arguments, **facts)

    monkeypatch.setattr(scheduler, "reconcile", spoilt)
    loop = loops(BATCH, patient)
    clock_is(NOON)

    loop.start()

    assert wait_until(lambda: rows("enqueued") == {NOON}, LIMIT)
    assert not loop._broken.is_set()


def test_a_loop_that_breaks_ends_the_process(loops, patient, monkeypatch):
    monkeypatch.setattr(scheduler, "AGAIN", 0.0)

    def broken(*_arguments, **_facts):
        raise TypeError

    monkeypatch.setattr(scheduler, "reconcile", broken)
    loop = loops(BATCH, patient)

    loop.start()
    loop.join(LIMIT)

    assert not loop._asked.empty()
    assert loop._broken.is_set()
