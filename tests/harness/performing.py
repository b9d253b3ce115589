"""Run batches and children in this process: only their functions, or a whole attempt as a worker does."""

from contextlib import ExitStack, contextmanager
from functools import partial

from forgekeeper.api.batches import ChildSpec
from forgekeeper.delivery.broker import broker
from forgekeeper.delivery.children import send_children
from forgekeeper.engine.attempt import Runner
from forgekeeper.engine.run import Run
from forgekeeper.engine.shared_work import SharedWork
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform.connections import process_identity
from tests.harness.settings import settings_with


def perform(declared, *ids, deadline=None, settings=None, outcome=None, now=None, **options):
    """Run the function of a batch or child without the ledger, at the time *now* if given; return the outcome."""
    settings = settings or settings_with()
    options = {"fan_out": partial(send_children, broker, None, limit_depth=None)} | options
    with ExitStack() as stack:
        if isinstance(declared, ChildSpec):
            options["shared"] = stack.enter_context(shared_work(declared, settings, "1", ids, options.get("number")))
        run = Run(declared, settings, outcome=outcome, deadline=deadline, **options)
        if now is not None:
            run.now = now
        declared.work(run, *ids)
    return run.outcome


@contextmanager
def shared_work(child, settings, key, ids, run):
    """Yield the work of a message with one child, and end it."""
    work = SharedWork(child, settings, [(key, ids)], run, may_have_failed=True)
    try:
        yield work
    finally:
        work.end()


@contextmanager
def runner_of(settings):
    """Yield the object that begins the attempts of a worker with these settings."""
    runner = Runner(settings, partial(send_children, broker, limit_depth=settings.queue_limit))
    try:
        yield runner
    finally:
        runner.stop()


def attempt_at(runner, batch):
    """Create an attempt at a new run of the batch, or at the run that waits for its retry."""
    return runner.create_attempt(batch, JobRun.start_here(batch.name, by=process_identity()))


@contextmanager
def child_attempt(runner, child, key, *ids, run=None):
    """Yield an attempt at a child that is alone in its message."""
    with (
        shared_work(child, runner.settings, key, ids, run) as work,
        runner.create_child_attempt(child, key, work, run=run) as attempt,
    ):
        yield attempt


def run_child(runner, child, key, *ids, run=None):
    """Run an attempt at a child from beginning to end; return it."""
    with child_attempt(runner, child, key, *ids, run=run) as attempt:
        attempt.work_if_allowed(*ids)
    return attempt


def run_attempt(attempt, *ids):
    """Run the attempt from beginning to end; return it."""
    with attempt:
        attempt.work_if_allowed(*ids)
    return attempt


def run_as_worker(declared, settings):
    """Run the batch as a worker does; return the row of its run, or raise the error of the attempt."""
    with runner_of(settings) as runner:
        attempt = run_attempt(attempt_at(runner, declared))
    if attempt.error is not None:
        raise attempt.error
    return JobRun.get_by_id(attempt.run.number)


def run_child_as_worker(declared, settings, *ids, message_id="1", run=None):
    """Run the child as a worker does, for the parent's *run*; return the child's run, or raise its error."""
    with runner_of(settings) as runner:
        attempt = run_child(runner, declared, message_id, *ids, run=run)
    if attempt.error is not None:
        raise attempt.error
    return attempt.run


def start_run(batch, run_id, *, by="worker"):
    """Start a run as a worker does: by its id and the token in its message."""
    row = JobRun.get_or_none(JobRun.id == run_id)
    return row and JobRun.start(batch, run_id, token=row.token, by=by)
