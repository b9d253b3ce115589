"""A minute's batch beside five-minute children and beside all other batches at work, under `forgekeeper up`."""

import os
import signal
from contextlib import suppress
from statistics import median

import peewee as pw
import pytest

from forgekeeper.batches import BATCHES
from forgekeeper.runs.ledger import JobRun
from tests.harness import samples as sample
from tests.harness.waiting import wait_until

from .worlds import CASES, EVERY_SECOND, LIMIT, World

NAME = "user_status_cleanup"
TICKS = 8
PROMISED = 2.0
"""Seconds after its time within which a tick begins."""
BUSY = 6.0
"""Seconds that a busy machine may add to one of them."""
THREADS = 2
FOREVER = "sleep:600"
HELD = {
    "git_ref_cleanup": "git_ref_cleanup.enqueued",
    "expired_job_artifacts": "expired_job_artifacts.enqueued",
    "delete_objects": "delete_objects.claimed",
    "stale_direct_uploads": "stale_direct_uploads.claimed",
    "stale_imports": "stale_imports.changed",
    "prune": "prune.deleted",
}
"""Where each of the other batches stays for as long as it likes."""
CHILDREN = ("clean_project_refs.deleted", "delete_artifact_bucket.claimed")


@pytest.fixture
def world(database, tmp_path):
    return World.make(database, tmp_path)


@pytest.fixture
def up(world, services):
    """Run everything; each other batch and each child is at it until the test is over."""
    crons = {f"cron_{batch}": EVERY_SECOND for batch in BATCHES}
    sizes = {"dead_after": "10", "worker_processes": "1", "worker_threads": str(THREADS)}
    held = ",".join(f"{step}={FOREVER}" for step in (*HELD.values(), *CHILDREN))
    service = services("up", "up", **world.environment | sizes | crons, failpoints=held)
    yield service
    for group in service.children:
        # Each of its commands has a group of its own.
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def seed(world):
    """Leave each batch something to be at."""
    for batch in HELD:
        case = CASES[batch](world)
        case.total, case.projects, case.each = 20, 2 * THREADS, 20
        case.seed()
    sample.user_statuses(200)


def busy(up):
    """Say whether all other batches are at work, and as many children as there are threads for them."""
    started = {row.batch for row in JobRun.select().where(JobRun.state == "started")}
    children = [line for line in up.lines() if line.get("name") in CHILDREN]
    return started >= set(HELD) and len(children) == THREADS


def delays(after):
    """Return how long after their time runs began, of the ticks since that row."""
    rows = JobRun.select().where(JobRun.batch == NAME, JobRun.id > after, JobRun.started_at.is_null(False))
    return [max(0.0, (row.started_at - row.tick).total_seconds()) for row in rows]


def test_a_tick_is_begun_in_time_while_all_other_batches_and_all_children_s_threads_are_busy(world, up, outcome):
    seed(world)
    assert wait_until(lambda: busy(up), LIMIT), "not all were ever busy"
    newest = JobRun.select(pw.fn.max(JobRun.id)).scalar()

    begun = wait_until(lambda: len(delays(newest)) >= TICKS, LIMIT)

    seconds = delays(newest)
    late = max(0, TICKS - len(seconds)) + sum(delay > PROMISED for delay in seconds)
    outcome(42, injected=TICKS, violations=late, recovery=seconds)
    assert busy(up)
    assert begun
    assert median(seconds) <= PROMISED
    assert max(seconds) <= PROMISED + BUSY
