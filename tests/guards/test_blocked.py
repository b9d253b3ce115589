"""A batch is blocked from the first of an unbroken row of runs that were, and says why."""

from datetime import timedelta
from uuid import uuid4

import pytest

from forgekeeper.api.batches import BATCHES, CHILDREN
from forgekeeper.guards.preconditions import PRECONDITION_REASONS, Blocked
from forgekeeper.ledger import holds
from forgekeeper.ledger.holds import Batch, Hold
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import now
from forgekeeper.platform.installation import INSTALLATION_KEY
from metrics.catalogue import BLOCKED_REASONS
from metrics.instruments import WORKER_METRICS
from tests.harness import clocks
from tests.harness.performing import attempt_at, child_attempt, runner_of

NAME, CHILD = "git_ref_cleanup", "clean_project_refs"
MISSING = Blocked("no_repositories", "no repositories are configured")
APART = Blocked("clocks", "the clocks are apart")
DAY = timedelta(days=1)
jump = clocks.jump
pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def runner(settings):
    with runner_of(settings) as runner:
        yield runner


@pytest.fixture
def run(runner):
    """Make an attempt at a run that ends so; return its row."""

    def run(blocked=None):
        with attempt_at(runner, BATCHES[NAME]) as attempt:
            attempt.blocked, attempt.run.skipped = blocked, blocked and blocked.reason
        return JobRun.get_by_id(attempt.run.number)

    return run


@pytest.fixture
def work(runner):
    """Work on a child that ends so."""

    def work(blocked=None):
        with child_attempt(runner, CHILDREN[CHILD], "clean_project_refs:1") as attempt:
            attempt.blocked, attempt.run.skipped = blocked, blocked and blocked.reason

    return work


def block():
    row = next(iter(Batch.list_blocked()), None)
    return row and (row.name, row.blocked_reason, row.blocked_sentence)


def since():
    return Batch.get_by_id(NAME).blocked_since


def counted(batch, reason):
    labels = {"batch": batch, "reason": reason}
    return WORKER_METRICS.registry.get_sample_value("forgekeeper_runs_skipped_total", labels) or 0


def test_a_block_counts_from_its_first_run_whatever_the_later_ones_say(run):
    run(MISSING)
    first = since()

    run(APART)

    assert since() == first
    assert block() == (NAME, "clocks", "the clocks are apart")


def test_a_run_that_ends_well_ends_the_block(run):
    run(MISSING)

    run()

    assert block() is None


def test_a_child_that_is_blocked_after_a_run_keeps_its_batch_blocked_through_the_next(run, work):
    run()
    work(MISSING)

    run()

    assert block() == (NAME, "no_repositories", "no repositories are configured")


def test_a_run_none_of_whose_children_was_blocked_ends_their_block_with_the_next(run, work):
    run()
    work(MISSING)
    run()
    work()

    run()

    assert block() is None


def test_a_blocked_run_is_a_skip_of_its_reason_and_neither_a_failure_nor_a_success(run):
    before = counted(NAME, "no_repositories")

    run(MISSING)

    health = JobRun.read_health(NAME)
    assert counted(NAME, "no_repositories") - before == 1
    assert (health.failures, health.last_success) == (0, None)


def test_metrics_know_every_reason():
    assert BLOCKED_REASONS == PRECONDITION_REASONS


# What operators are reminded of


def test_a_pause_without_an_end_is_said_and_one_with_an_end_is_not():
    Hold.add(NAME, "pause", until=None, reason="a move", by="me")
    Hold.add("prune", "pause", until=now() + DAY, reason=None, by="me")

    (said,) = holds.list_warnings()

    assert said.startswith(f"{NAME} has been paused by me since ")
    assert ", without an end (a move): `forgekeeper resume git_ref_cleanup --by me`" in said


def test_children_share_a_check_of_the_preconditions_for_a_second(runner, jump):
    child = CHILDREN[CHILD]
    checked = [runner.check_preconditions(child), runner.check_preconditions(child)]

    jump()

    assert [*checked, runner.check_preconditions(child)] == [True, False, True]


def test_a_run_checks_the_preconditions_itself(runner):
    assert [runner.check_preconditions(BATCHES[NAME]) for _ in range(2)] == [True, True]


def test_no_child_relies_on_a_check_that_has_failed(runner):
    client.set(INSTALLATION_KEY, str(uuid4()))

    for _ in range(2):
        with pytest.raises(Blocked):
            runner.check_preconditions(CHILDREN[CHILD])
