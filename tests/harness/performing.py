"""Batches and children run here: as their functions alone, or as a worker's message calls them."""

from contextlib import contextmanager

from forgekeeper.batches import spec
from forgekeeper.delivery.enqueue_many import enqueue_many
from forgekeeper.identity import identity
from forgekeeper.process.broker import broker
from forgekeeper.runs.child import Child
from forgekeeper.runs.deadline import Deadline
from forgekeeper.runs.ledger import JobRun
from forgekeeper.runs.run import Run
from forgekeeper.runs.runner import Runner
from tests.harness.settings import settings_with


def perform(declared, *ids, deadline=None, settings=None, outcome=None, now=None, **options):
    """Run the batch's or child's function, without a ledger, as of *now* if given; return the outcome."""
    settings = settings or settings_with()
    options = {"fan_out": lambda one, keyed: enqueue_many(broker, broker.get_actor(one.name), keyed)} | options
    run = Run(declared, settings, deadline=deadline or Deadline(declared.budget), outcome=outcome, **options)
    if now is not None:
        run.now = now
    declared.work(run, *ids)
    return run.outcome


@contextmanager
def attempting(declared, settings):
    """Make an attempt at the batch, within which `act` calls it, and close it; yield the attempt."""
    runner = Runner(settings)
    attempt = runner.begin(declared.name, JobRun.start_here(declared.name, by=identity()))
    attempt.begin(declared.nothing)
    error = None
    try:
        yield attempt
    except Exception as raised:
        error = raised
        raise
    finally:
        runner.close(attempt, error)
        runner.stop()


def recorded(declared, settings):
    """Run the batch as a worker does; return the row of its run."""
    with attempting(declared, settings) as attempt:
        act(declared)
    return JobRun.get_by_id(attempt.run.id)


def as_child(declared, settings, *ids, message_id="1"):
    """Call the child as a worker does; return it."""
    one, error = Child(declared.name, message_id, settings), None
    one.enter()
    try:
        act(declared, *ids)
    except Exception as raised:
        error = raised
        raise
    finally:
        one.leave(error)
    return one


def act(declared, *ids):
    """Call the actor as a message does, within the attempt that this thread makes."""
    broker.get_actor(declared.name).fn(*ids)


def message_of(name, *args):
    """Return a message of the batch or child of that name."""
    assert spec(name), f"{name} is not declared"
    return broker.get_actor(name).message(*args)
