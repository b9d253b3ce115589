"""A worker that is killed between two steps of a batch, and then started again, ends as an undisturbed one, and the audit says so."""

from functools import partial
from time import monotonic

import pytest

from forgekeeper.api.batches import BATCHES, list_queues
from forgekeeper.delivery.queues import count_messages
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform.connections import client
from tests.harness.audited import count_open_intents
from tests.harness.failpoints import failpoints
from tests.harness.waiting import wait_until

from .worlds import CASES, LIMIT, ONCE_A_YEAR, PATIENT, World

BATCH_OF = {
    "delete_artifact_bucket": "expired_job_artifacts",
    "clean_project_refs": "git_ref_cleanup",
    "run": "user_status_cleanup",
}
"""Which batch's case reaches a failpoint that is not named for a batch."""
FAULTS = {
    "run.closed": 2,
    "clean_project_refs.deleted": 3,
    "stale_direct_uploads.deleted": 4,
    "delete_objects.deleted": 4,
}
"""Which fault of the matrix that is; any other failpoint lies somewhere in a batch."""
WORKER = ("--processes", "1", "--threads", "2")
OF_WORKERS = [name for name in failpoints() if not name.startswith("tick.")]
"""A tick's are the schedulers': `test_scheduler_faults.py` has them."""


@pytest.fixture
def world(database, tmp_path):
    return World.make(database, tmp_path)


@pytest.fixture(scope="module")
def undisturbed():
    """How things stand after a run that nobody disturbs, by batch; found out once for each."""
    return {}


@pytest.fixture
def expected(world, services, undisturbed):
    """Run the batch where nobody disturbs it, if it has not been run; say how things stood then."""

    def expected(batch):
        if batch not in undisturbed:
            case = CASES[batch](world)
            case.seed()
            assert case.left() == case.total
            service = services("undisturbed", "run", batch, **world.environment | PATIENT)
            assert service.process.wait(LIMIT) == 0
            assert case.left() == 0
            state, audited = case.standing()
            assert (len(audited), count_open_intents()) == (case.total if case.record else 0, 0)
            undisturbed[batch] = state, audited
            world.empty()
        return undisturbed[batch]

    return expected


@pytest.mark.parametrize("name", OF_WORKERS)
def test_a_worker_killed_there_and_started_again_ends_as_an_undisturbed_one(world, services, expected, outcome, name):
    step = name.split(".")[0]
    batch = BATCH_OF.get(step, step)
    want, case = expected(batch), CASES[batch](world)
    case.seed()
    others = {f"cron_{other}": "off" for other in BATCHES if other != batch}
    settings = {**world.environment, **others, f"cron_{batch}": case.cron}
    run = JobRun.claim_manual(batch, by="test")

    # What `forgekeeper worker` becomes once its servers are there: it is quicker to begin with that.
    worker_of = partial(services, module="forgekeeper.process", worker_threads="2", **settings)
    killed = worker_of("killed", *WORKER, failpoints=f"{name}=kill")
    services("scheduler", "scheduler", **settings)
    assert wait_until(lambda: killed.said("failpoint reached"), LIMIT), "the worker was not killed"
    killed.kill()
    case.claims_run_out()
    worker = worker_of("worker", *WORKER)
    began = monotonic()
    wait_until(lambda: ended(run, case) and case.standing() == want, LIMIT)
    outcome(FAULTS.get(name, 1), injected=1, violations=case.standing() != want, recovery=[monotonic() - began])
    quiet = wait_until(lambda: not messages(case), LIMIT)
    worker.kill()

    assert {line["name"] for line in killed.said("failpoint reached")} == {name}
    assert case.standing() == want
    assert (ended(run, case), quiet, count_open_intents()) == (True, True, 0)


def ended(run, case):
    """Say whether the killed run has ended well, or has given way to a later tick where there is one."""
    row = JobRun.get_by_id(run)
    return row.state == "succeeded" or (case.cron != ONCE_A_YEAR and row.reason == "superseded")


def messages(case):
    """Count the messages that are left; of a batch that is due every second, those of its children."""
    depths = [count_messages(client, queue) for queue in list_queues() if queue != "cron" or case.cron == ONCE_A_YEAR]
    return sum(counts["ready"] + counts["in_flight"] + counts["delayed"] for counts in depths)
