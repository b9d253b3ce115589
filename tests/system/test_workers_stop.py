"""A worker that is stopped for longer than its lease, bucket or run lasts, and goes on when another has done its work.

It stands between two steps of a batch meanwhile, where a failpoint holds it up.
"""

import os
import signal
import time

import pytest

from demo.sample_data.git_ref_cleanup import add_ref_deletions as ref_deletions
from forgekeeper.batches import BATCHES, queues
from forgekeeper.runs.ledger import JobRun
from models import Project
from tests.harness.waiting import wait_until

from .worlds import CASES, LIMIT, World, undisturbed, unfinished

STEPS = {
    "user_status_cleanup": "user_status_cleanup.deleted",
    "expired_job_artifacts": "delete_artifact_bucket.destroyed",
    "git_ref_cleanup": "clean_project_refs.deleted",
}
"""Where the worker stands: behind its first chunk, its first bucket's, or between git and the table."""
HOLD_UP = "sleep:8*1"
"""Longer than it takes to stop a process that has come to that step."""
ENDS = {"run finished", "run lost", "run failed", "child finished", "child failed", "child lost"}
OPEN = ("claimed", "enqueued", "started")


@pytest.fixture
def world(database, tmp_path):
    return World.make(database, tmp_path)


class Scene:
    """A worker that was stopped in the middle of a batch, another in its place, and all that goes on with them."""

    def __init__(self, batch, case, services):
        self.case = case
        others = {f"cron_{other}": "off" for other in BATCHES if other != batch}
        self._environment = {**case.world.environment, **others, f"cron_{batch}": case.cron}
        self._services = services
        self.run = JobRun.claim_manual(batch, by="test")
        self.scheduler = services("scheduler", "scheduler", **self._environment)
        self.stale = self._worker("stale", failpoints=f"{STEPS[batch]}={HOLD_UP}")
        assert wait_until(lambda: self.said("failpoint reached"), LIMIT), "it never came to the step"
        os.killpg(self.stale.process.pid, signal.SIGSTOP)
        self.stopped_at = time.monotonic()
        self.successor = self._worker("successor")

    def _worker(self, name, **environment):
        arguments = ("worker", "--processes", "1", "--threads", "1")
        return self._services(name, *arguments, **self._environment, **environment)

    def row(self):
        return JobRun.get_by_id(self.run).__data__

    def said(self, message):
        """Return what the stopped worker has said."""
        return [line for line in self.stale.lines() if line.get("message") == message]

    def go_on(self):
        """Let the worker go on, and wait until it has ended what it was at."""
        before = len(self.ends())
        os.killpg(self.stale.process.pid, signal.SIGCONT)
        assert wait_until(lambda: len(self.ends()) > before, LIMIT), "it never ended what it was at"

    def ends(self):
        return [line for line in self.stale.lines() if line.get("message") in ENDS]

    def refusals(self):
        """Count what it was not let do: close its run, keep its bucket or its lease."""
        children = [line for line in self.said("child finished") if line["stopped"] in {"scale_down", "bucket_lost"}]
        failures = [line for line in self.said("child failed") if "LeaseLost" in str(line.get("exception"))]
        return len([*self.said("run lost"), *children, *failures])


@pytest.mark.parametrize("batch", STEPS)
def test_a_worker_that_was_stopped_changes_nothing_that_another_did_meanwhile(world, services, outcome, say, batch):
    case = CASES[batch](world)
    expected = undisturbed(case, batch, services)
    world.empty()
    case.seed()
    scene = Scene(batch, case, services)

    done = wait_until(lambda: case.state() == expected and scene.row()["state"] not in OPEN, LIMIT)
    seconds = time.monotonic() - scene.stopped_at
    row = scene.row()
    scene.go_on()

    changed = [before != after for before, after in ((expected, case.state()), (row, scene.row()))]
    outcome(7, injected=1, violations=sum(changed), recovery=[seconds], duplicates=len(scene.said("failpoint reached")))
    say(f"{batch}: stopped for {seconds:.1f} s, then refused {scene.refusals()} times")
    assert done
    assert changed == [False, False]


def test_a_worker_that_was_stopped_deletes_no_refs_once_its_lease_is_another_s(world, services, outcome, say):
    case = CASES["git_ref_cleanup"](world)
    case.projects = 1
    case.seed()
    scene = Scene("git_ref_cleanup", case, services)
    done = wait_until(lambda: case.left() == 0, LIMIT)
    seconds = time.monotonic() - scene.stopped_at
    scene.scheduler.kill()
    # Or else the stopped worker would rescue what the successor is killed over, and that with a lease of its own.
    ended = wait_until(lambda: not unfinished(*queues()), LIMIT)
    scene.successor.kill()

    more = [f"refs/merge-requests/{case.doomed + number}/head" for number in range(3)]
    project = Project.get()
    ref_deletions([project.id], more)
    refs = case.refs(project.disk_path)
    scene.go_on()

    deleted = int(case.refs(project.disk_path) != refs)
    outcome(7, injected=1, violations=deleted, recovery=[seconds], duplicates=1)
    say(f"git_ref_cleanup: stopped for {seconds:.1f} s, then refused {scene.refusals()} times")
    assert (done, ended) == (True, True)
    assert (case.left(), deleted) == (len(more), 0)
    assert scene.said("child failed")
