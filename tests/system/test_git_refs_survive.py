"""Real workers delete refs while users push, and while the workers are asked to end.

REFS_CHAOS_SECONDS sets for how long users push; CHAOS_SEED repeats a schedule (its effects depend on timing).
"""

import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from models import DeletionStatus, GitRefDeletion, Project
from tests.harness.git_samples import Bare, gits
from tests.harness.waiting import wait_until
from workers.git_ref_cleanup.cleaning import MAX_DELETES

DURATION = float(os.environ.get("REFS_CHAOS_SECONDS", "12"))
SEED = int(os.environ.get("CHAOS_SEED", random.randrange(2**32)))
PATIENCE = 120.0
PUSHERS = 3
PUSHED_REFS = 1_500
DOOMED_AT_ONCE = 25
FEED_EVERY = 0.25
MOST_MORE_FAILURES = 0.02
ENVIRONMENT = {
    "cron_git_ref_cleanup": "* * * * * *",
    "cron_user_status_cleanup": "off",
    "cron_expired_job_artifacts": "off",
    "cron_delete_objects": "off",
    "cron_stale_direct_uploads": "off",
    "cron_stale_imports": "off",
    "cron_prune": "off",
    "retry_after": "1",
    "poll_interval": "0.5",
    "log_format": "json",
}
WORKER = ("worker", "--processes", "2", "--threads", "2")


class Forge:
    """Repositories, rows that doom some of their refs, and the processes that are to delete these."""

    def __init__(self, database, root, services):
        self.database = database
        self.root = root
        self._services = services

    def repository(self, number=1):
        bare = Bare(self.root, f"{number}.git")
        Project.create(id=number, disk_path=bare.disk_path)
        return bare

    def doom(self, number, refs, expected_oid=None):
        rows = [(number, ref, expected_oid) for ref in refs]
        fields = [GitRefDeletion.project_id, GitRefDeletion.ref, GitRefDeletion.expected_oid]
        GitRefDeletion.insert_many(rows, fields=fields).execute()

    def start(self, **options):
        options = {**ENVIRONMENT, "repositories_root": str(self.root), **options}
        self.scheduler = self._services("scheduler", "scheduler", **options)
        return self.worker("worker", **options)

    def worker(self, name, **options):
        return self._services(name, *WORKER, **{**ENVIRONMENT, "repositories_root": str(self.root), **options})

    def pending(self):
        return GitRefDeletion.pending().count()

    def statuses(self):
        return Counter(status for (status,) in GitRefDeletion.select(GitRefDeletion.status).tuples())

    def drained(self):
        """Wait until no row is pending."""
        return wait_until(lambda: self.pending() == 0, PATIENCE)


@pytest.fixture
def forge(database, root, services):
    return Forge(database, root, services)


def lines(services, message):
    return [line for service in services for line in service.lines() if line.get("message") == message]


@dataclass
class Pusher(threading.Thread):
    """A user who pushes all the time: to a branch of his own, and now and then a ref that is doomed, anew.

    A push of a ref that was deleted since git told him of it is refused by any git, and says so; he tries again.
    """

    number: int
    clone: Path
    bare: Bare
    dice: random.Random
    anew: list
    """Refs that he may make anew: he takes one at a time."""
    pushes: int = 0
    failures: list = field(default_factory=list)
    made: set = field(default_factory=set)

    def __post_init__(self):
        super().__init__(daemon=True)
        self.stopped = threading.Event()

    def __hash__(self):
        return id(self)

    def run(self):
        while not self.stopped.is_set():
            ref = self._doomed() if self.dice.random() < 0.3 else None
            oid = self.dice.choice([self.bare.one, self.bare.two]) if ref is None else self.bare.two
            self._push(oid, ref or f"refs/heads/user{self.number}/{self.dice.randrange(5)}", anew=ref)

    def _doomed(self):
        try:
            return self.anew.pop(self.dice.randrange(-DOOMED_AT_ONCE, 0))
        except IndexError:
            return None

    def _push(self, oid, ref, *, anew):
        command = ["git", f"--git-dir={self.clone}", "push", "--quiet", "--force", str(self.bare.path), f"{oid}:{ref}"]
        done = subprocess.run(command, capture_output=True, check=False)
        self.pushes += 1
        if done.returncode:
            said = done.stderr.decode()
            overtaken = anew and f"cannot lock ref '{ref}': unable to resolve reference '{ref}'" in said
            if overtaken:
                self._push(oid, ref, anew=anew)
            else:
                self.failures.append(said)
        elif anew:
            self.made.add(ref)

    def stop(self):
        self.stopped.set()
        self.join()


@pytest.fixture
def push(tmp_path):
    """Let users push for a while; return them."""
    users = []

    def start(bare, anew):
        dice = random.Random(SEED)
        for number in range(PUSHERS):
            clone = tmp_path / f"clone{len(users)}"
            subprocess.run(["git", "clone", "--quiet", "--bare", bare.path, clone], capture_output=True, check=True)
            users.append(Pusher(number, clone, bare, random.Random(dice.random()), anew))
            users[-1].start()
        return users[-PUSHERS:]

    yield start
    for user in users:
        user.stop()


def share_of_failures(users):
    return sum(len(user.failures) for user in users) / sum(user.pushes for user in users)


def test_pushes_neither_fail_because_of_us_nor_lose_a_ref_that_was_made_anew(forge, push, say, outcome):
    bare = forge.repository()
    bare.git("config", "receive.autogc", "false")
    names = [f"refs/mr/{number}" for number in range(2 * PUSHED_REFS)]
    bare.packed(*names, "refs/heads/main", "refs/heads/two")
    bare.loose("refs/heads/two", value=bare.two)
    pacing = threading.Event()

    # The same pushes, without the batch.
    control = push(bare, anew=names[PUSHED_REFS:])
    pacing.wait(DURATION)
    for user in control:
        user.stop()
    worker, doomed, ready, waiting = forge.start(), [], [], names[:PUSHED_REFS]
    assert wait_until(lambda: lines([worker], "run finished"), PATIENCE), "the batch never ran"
    users, ending = push(bare, anew=ready), time.monotonic() + DURATION
    while time.monotonic() < ending:
        some, waiting = waiting[:DOOMED_AT_ONCE], waiting[DOOMED_AT_ONCE:]
        forge.doom(1, some, expected_oid=bare.one)
        doomed += some
        # Users make some of those anew that are being deleted just now.
        ready += some
        pacing.wait(FEED_EVERY)
    meanwhile = forge.statuses()
    for user in users:
        user.stop()
    drained = forge.drained()

    made = set().union(*(user.made for user in users))
    without_us, with_us = share_of_failures(control), share_of_failures(users)
    say(
        f"seed {SEED}: of {sum(user.pushes for user in users)} pushes {with_us:.2%} failed, {without_us:.2%} without us;"
        f" {meanwhile[DeletionStatus.PROCESSED]:,} of {len(doomed):,} refs deleted meanwhile, {len(made)} made again"
    )
    refs = bare.refs()
    wrong = {ref for ref in made if refs.get(ref) != bare.two} | ({ref for ref in doomed if ref in refs} ^ made)
    outcome(36, injected=sum(user.pushes for user in users), violations=len(wrong))
    assert drained
    assert wrong == set()
    assert (meanwhile[DeletionStatus.PROCESSED] > 0, len(made) > 0) == (True, True)
    assert {ref for ref in waiting if refs.get(ref) != bare.one} == set()
    assert {row.reason for row in GitRefDeletion.rejected()} <= {"moved"}
    assert {row.ref for row in GitRefDeletion.rejected()} <= made
    assert with_us <= without_us + MOST_MORE_FAILURES
    assert bare.locks() == []
    bare.fsck()


@pytest.mark.parametrize("whom", ["the worker", "the worker and git"])
def test_a_worker_that_is_asked_to_end_in_the_middle_of_git_leaves_no_lock_and_the_next_finishes(
    forge, root, services, whom
):
    bare = forge.repository()
    doomed = [f"refs/mr/{number}" for number in range(12_000)]
    bare.packed(*doomed, "refs/mr/kept")
    forge.doom(1, doomed)
    # Somebody's lock, for which git waits while it holds those of ten thousand refs.
    (bare.path / "packed-refs.lock").touch()
    worker = forge.start()
    # It has them all: ended in the middle of making one, even git leaves that one behind.
    assert wait_until((bare.path / f"{max(doomed[:MAX_DELETES])}.lock").exists, PATIENCE), "not all was ever locked"

    worker.process.terminate()
    if whom == "the worker and git":
        for process in gits(root):
            os.kill(process, signal.SIGTERM)
    assert wait_until(lambda: lines([worker], "worker draining"), PATIENCE), "it did not hear it"
    (bare.path / "packed-refs.lock").unlink()
    status = worker.process.wait(PATIENCE)
    locks, left = bare.locks(), forge.pending()
    successor = forge.worker("successor")
    drained = forge.drained()

    assert (status, locks) == (0, [])
    assert left == (2_000 if whom == "the worker" else 12_000)
    assert (drained, set(bare.refs()) & {*doomed, "refs/mr/kept"}) == (True, {"refs/mr/kept"})
    assert successor.stop() == 0
    bare.fsck()
