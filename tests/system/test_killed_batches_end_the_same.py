"""A batch that is killed in the middle, and then taken up by a scheduler and a worker, ends as if nothing had been."""

from time import monotonic

import pytest

from forgekeeper.batches import BATCHES as ALL
from forgekeeper.runs.ledger import JobRun
from tests.harness.waiting import wait_until

from .worlds import CASES, EVERY_SECOND, LIMIT, World, undisturbed

BATCHES = ("user_status_cleanup", "stale_imports", "stale_direct_uploads", "delete_objects", "expired_job_artifacts")


@pytest.fixture
def world(database, tmp_path):
    return World.make(database, tmp_path)


@pytest.mark.parametrize("batch", BATCHES)
def test_a_batch_that_is_killed_and_taken_up_ends_as_an_undisturbed_run(world, services, outcome, batch):
    case = CASES[batch](world)
    expected = undisturbed(case, batch, services)
    world.empty()
    case.seed()
    killed = services("killed", "run", batch, **world.environment, **case.pace)
    assert wait_until(lambda: 0 < case.left() < case.total, LIMIT), "the run did nothing"
    killed.kill()
    left = case.left()
    case.claims_run_out()

    others = {f"cron_{name}": "off" for name in ALL if name != batch}
    options = {**world.environment, **others, f"cron_{batch}": case.cron}
    services("scheduler", "scheduler", **options)
    services("worker", "worker", "--processes", "1", "--threads", "2", **options)
    began = monotonic()
    wait_until(lambda: case.state() == expected, LIMIT)
    outcome(1, injected=1, violations=case.state() != expected, recovery=[monotonic() - began])

    assert 0 < left < case.total, "it was not killed in the middle"
    assert case.state() == expected
    assert wait_until(lambda: closed(batch), LIMIT), "the row of the killed run stayed open"


@pytest.mark.parametrize("batch", BATCHES)
def test_a_batch_that_is_killed_again_and_again_ends_as_an_undisturbed_run(world, services, outcome, batch):
    case = CASES[batch](world)
    expected = undisturbed(case, batch, services)
    world.empty()
    case.seed()
    left = case.total
    others = {f"cron_{name}": "off" for name in ALL if name != batch}
    options = {**world.environment, **case.pace, **others, f"cron_{batch}": EVERY_SECOND}
    services("scheduler", "scheduler", **options)

    kills = []
    for number in range(3):
        worker = services(f"worker{number}", "worker", "--processes", "1", "--threads", "1", **options)
        assert wait_until(lambda left=left: case.left() < left, LIMIT), f"worker {number} did nothing"
        worker.kill()
        left = case.left()
        kills.append(left)
        case.claims_run_out()
    services("last worker", "worker", "--processes", "1", "--threads", "2", **options)
    began = monotonic()
    wait_until(lambda: case.state() == expected, LIMIT)
    outcome(1, injected=len(kills), violations=case.state() != expected, recovery=[monotonic() - began])

    assert case.state() == expected
    assert kills[0] > 0, "the first was not killed in the middle"


def closed(batch):
    """Say whether the batch's first run, the killed one, has come to its end."""
    return JobRun.select().where(JobRun.batch == batch).order_by(JobRun.id).first().state == "succeeded"
