"""Refs are deleted by real workers: while these are killed or asked to end, and while users push.

REFS_CHAOS_SECONDS sets for how long workers are killed and users push; CHAOS_SEED repeats a
schedule of both (their effects depend on timing all the same).
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

from forgekeeper.connections import client
from forgekeeper.locks import leases
from models import DeletionStatus, GitRefDeletion, Project
from tests.harness.git_samples import Bare, gits, stand_in
from tests.harness.waiting import wait_until
from workers.git_ref_cleanup.cleaning import MAX_DELETES

DURATION = float(os.environ.get("REFS_CHAOS_SECONDS", "12"))
SEED = int(os.environ.get("CHAOS_SEED", random.randrange(2**32)))
PATIENCE = 120.0
START = 10.0
PROJECTS, DOOMED, OTHERS = 20, 3_000, 1_000
PUSHERS = 3
PUSHED_REFS = 1_500
DOOMED_AT_ONCE = 25
FEED_EVERY = 0.25
MOST_MORE_FAILURES = 0.02
COMMITS, BRANCHES, TAGS = 300, 6_000, 6_000
LOOSE = 500
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
# So slow that a kill hits a child before, in and after its transaction; git itself is as fast as ever.
SLOW = """
case "$*" in *update-ref*)
    sleep 0.2
    "$GIT" "$@"
    code=$?
    sleep 0.2
    exit $code
esac
exec "$GIT" "$@"
"""


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

    def drained(self, workers=()):
        """Wait until no row is pending; a worker that has died is started again meanwhile."""

        def nothing_is_left():
            for worker in workers:
                worker.restart_if_dead()
            return self.pending() == 0

        return wait_until(nothing_is_left, PATIENCE)


@pytest.fixture
def forge(database, root, services):
    return Forge(database, root, services)


def lines(services, message):
    return [line for service in services for line in service.lines() if line.get("message") == message]


# Killed workers


def test_exactly_the_doomed_refs_go_while_workers_are_killed_at_random(forge, tmp_path, monkeypatch, say, outcome):
    doomed = [f"refs/mr/{number}/head" for number in range(DOOMED)]
    others = [f"refs/heads/topic/{number}" for number in range(OTHERS - 1)] + ["refs/heads/main"]
    repositories = {number: forge.repository(number) for number in range(1, PROJECTS + 1)}
    for number, bare in repositories.items():
        bare.packed(*doomed, *others)
        bare.loose(*doomed[::100], *others[::100])
        forge.doom(number, doomed)
    expected = dict.fromkeys(others, repositories[1].one)
    stand_in(tmp_path / "bin", monkeypatch, SLOW)
    # Little patience where workers die, and only there: a busy machine must not be taken for a dead worker.
    worker, dice, kills, orphans = forge.start(dead_after="1"), random.Random(SEED), 0, 0
    pacing, began = threading.Event(), time.monotonic()
    assert wait_until(lambda: gits(forge.root), PATIENCE), "nothing was ever deleted"
    ending = time.monotonic() + DURATION

    while forge.pending() and time.monotonic() < ending:
        wait_until(lambda: gits(forge.root), START)
        pacing.wait(dice.uniform(0, 1.5))
        kills += worker.kill_a_child(dice)
        orphans += len(gits(forge.root))
        wait_until(lambda: worker.process.poll() is not None, START)
        worker.restart_if_dead()
    meanwhile, killed = PROJECTS * DOOMED - forge.pending(), time.monotonic()
    drained = forge.drained([worker])
    seconds = time.monotonic() - began
    ended = wait_until(lambda: not gits(forge.root), PATIENCE)
    wrong = [bare for bare in repositories.values() if (bare.refs(), bare.locks()) != (expected, [])]
    outcome(1, injected=kills, violations=len(wrong), recovery=[began + seconds - killed])

    finished = lines([worker], "child finished")
    say(
        f"seed {SEED}: {kills} worker processes killed, {orphans} gits seen to outlive them;"
        f" {meanwhile:,} of {PROJECTS * DOOMED:,} rows closed meanwhile, all after {seconds:.1f} s",
        f"  {Counter(line['stopped'] for line in finished)}, {len(lines([worker], 'child failed'))} children failed,"
        f" {len(lines([worker], 'refs locked'))} found refs locked",
    )
    assert (drained, ended, forge.statuses()) == (True, True, {DeletionStatus.PROCESSED: PROJECTS * DOOMED})
    assert kills > 0
    assert wrong == []
    for bare in repositories.values():
        bare.fsck()
    assert wait_until(lambda: leases(client) == [], PATIENCE), "a lease was never free again"


# Pushes


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
    overtaken: list = field(default_factory=list)
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
            (self.overtaken if overtaken else self.failures).append(said)
            if overtaken:
                self._push(oid, ref, anew=anew)
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
    reasons = Counter(text.strip().splitlines()[0] for user in users for text in user.failures)
    say(
        f"seed {SEED}: without us {sum(user.pushes for user in control)} pushes, {without_us:.2%} failed;"
        f" with us {sum(user.pushes for user in users)}, {with_us:.2%} failed {dict(reasons.most_common(3)) or ''}"
        f" and {sum(len(user.overtaken) for user in users)} were overtaken by the deletion of their ref",
        f"  {len(doomed):,} refs doomed, {meanwhile[DeletionStatus.PROCESSED]:,} deleted meanwhile,"
        f" {len(made)} made anew; {forge.statuses()[DeletionStatus.REJECTED]} rows rejected as moved;"
        f" {len(lines([worker], 'child failed'))} children failed,"
        f" {len(lines([worker], 'refs locked'))} found refs locked",
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


# Workers that are asked to end


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


# A large repository


def test_a_third_of_a_large_repository_goes_and_two_thirds_stay_as_they_were(forge, say):
    bare = forge.repository()
    refs = build(bare)
    before = everything(bare)
    doomed = refs[::3]
    forge.doom(1, doomed)
    began = time.monotonic()

    worker = forge.start()
    drained = forge.drained()
    seconds = time.monotonic() - began

    assert wait_until(lambda: [line for line in lines([worker], "child finished") if not line["more"]], PATIENCE)
    finished = [line for line in lines([worker], "child finished") if line["total_deletes"]]
    shares = ", ".join(f"{line['total_deletes']:,} in {line['seconds']} s" for line in finished)
    say(f"{len(doomed):,} of {len(before):,} refs deleted {seconds:.1f} s after the start, by children: {shares}")
    assert drained
    assert everything(bare) == {name: facts for name, facts in before.items() if name not in set(doomed)}
    assert forge.statuses() == {DeletionStatus.PROCESSED: len(doomed)}
    bare.fsck()
    # The parent's last line carries its figures.
    assert wait_until(lambda: lines([worker], "run finished"), PATIENCE)
    (first, *_) = lines([worker], "run finished")
    assert first["stats"] == {
        "total_projects": 1,
        "enqueued": 1,
        "deduplicated": 0,
        "stopped": "drained",
        "missing_repositories": 0,
    }


def build(bare):
    """Add thousands of branches and tags, packed and loose, plain and annotated; return their names, mixed."""
    history = "".join(
        f"commit refs/heads/main\nmark :{number}\ncommitter A <a@example.org> {1_700_001_000 + number} +0000\n"
        f"data 2\nc\ntag annotated{number}\nfrom :{number}\ntagger A <a@example.org> {1_700_001_000 + number} +0000\n"
        "data 2\nt\n"
        for number in range(1, COMMITS + 1)
    )
    bare.git("fast-import", "--quiet", "--force", given=history.encode())
    commits = bare.git("rev-list", "main").splitlines()
    objects = bare.git("for-each-ref", "--format=%(objectname)", "refs/tags").splitlines()
    branches = [f"refs/heads/{('topic', 'fix', 'ü')[n % 3]}/{n % 97}/{n}" for n in range(BRANCHES)]
    tags = [f"refs/tags/v{n // 100}.{n % 100}" for n in range(TAGS)]
    values = {name: commits[n % len(commits)] for n, name in enumerate(branches)}
    values |= {name: (objects if n % 2 else commits)[n % COMMITS] for n, name in enumerate(tags)}
    create(bare, values)
    bare.git("pack-refs", "--all")
    names = list(values)
    random.Random(0).shuffle(names)
    # Some have moved since they were packed, and some are the other kind of loose.
    create(bare, dict.fromkeys(names[:LOOSE], commits[0]))
    bare.git("symbolic-ref", "refs/heads/alias", "refs/heads/main")
    return names


def create(bare, values):
    bare.git("update-ref", "--stdin", given="".join(f"update {name} {oid}\n" for name, oid in values.items()).encode())


def everything(bare):
    """Return what git says of each ref: its value, what it leads to, and whether it is symbolic."""
    said = bare.git("for-each-ref", "--format=%(refname) %(objectname) %(*objectname) %(symref)")
    return {name: facts.strip() for name, _, facts in (line.partition(" ") for line in said.splitlines())}
