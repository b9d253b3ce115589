"""Batches and children run here: as their functions alone, or as a worker's message calls them."""

from forgekeeper.batches import spec
from forgekeeper.process.broker import broker
from forgekeeper.runs.deadline import Deadline
from forgekeeper.runs.run import Run
from tests.harness.settings import settings_with


def perform(declared, *ids, deadline=None, settings=None, outcome=None, now=None, **options):
    """Run the batch's or child's function, without a ledger, as of *now* if given; return the outcome."""
    settings = settings or settings_with()
    run = Run(declared, settings, deadline=deadline or Deadline(declared.budget), outcome=outcome, **options)
    if now is not None:
        run.now = now
    declared.work(run, *ids)
    return run.outcome


def act(declared, *ids):
    """Call the actor as a message does, within the attempt that this thread makes."""
    broker.get_actor(declared.name).fn(*ids)


def message_of(name, *args):
    """Return a message of the batch or child of that name."""
    assert spec(name), f"{name} is not declared"
    return broker.get_actor(name).message(*args)
